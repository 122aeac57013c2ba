"""Attribution from a Hugging Face `Trainer`: its model, data, collator, tokenizer and recipe, as they are.

::

    trainer.train()
    result = whence.hf.attribute(trainer, [{"prompt": "Who wrote it?", "completion": " She did."}])
    result.to_html("report.html")

What the trainer's collator makes of a row is what the model was trained on, so it is what is scored: masked prompts of
TRL's `SFTTrainer` and packed sequences with their position ids included. Before anything long, the losses of some
examples, unlike each other, are compared with the trainer's own, and a trainer with another loss is refused.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from whence.arguments import checked
from whence.attribution import Attribution
from whence.attribution import attribute as attribute_model
from whence.errors import DataError, ModelError, OptionError
from whence.exhibit import Exhibit
from whence.libraries import load_library
from whence.sources.models import context_length, task_of
from whence.sources.queries import language_queries
from whence.sources.records import RowList
from whence.tasks import LanguageModeling, Preference, Task
from whence.tasks.categorical import IGNORED
from whence.training import KEPT, Training

__all__ = ["KeepTraining", "attribute"]

transformers = load_library("transformers", "hf", "to read a Trainer")
_Callback: Any = transformers.TrainerCallback

#: How far losses may differ, relative to them: in float32, and where the training runs in half precision.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.03
#: Where packed texts begin, once more, for kernels that need it so; the position ids say it, too.
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k")
#: Rows whose losses are compared at most, and how many are looked at to find them; values that a column may have there
#: to tell kinds of rows; labels that are not predicted.
_COMPARED, _LOOKED_AT, _KINDS, _LEFT_OUT = 16, 256, 32, -100


@checked("queries", "checkpoints")
def attribute(
    trainer: Any,
    queries: Sequence[Mapping[str, Any]],
    *,
    train: Any = None,
    task: Task | None = None,
    first: int | None = None,
    checkpoints: Sequence[str | Path] = (),
    **given: Any,
) -> Attribution:
    """Which of a trainer's examples made its model say this; see `whence.attribute`.

    Args:
        trainer: a `transformers.Trainer`, or one of TRL's that predicts tokens, after its training. Or a list of them,
            which differ in their seeds: then their scores are averaged, and the rest is the first one's.
        queries: of a language model, ``{"prompt": …, "completion": …}``, ``{"messages": […]}`` or ``{"text": …}``; of
            any model, rows like those of the trainer's data. A field ``contrast`` beside it holds another completion,
            or another label: "why this rather than that?".
        train: rows to attribute to; by default the trainer's own data.
        task: what the model's outputs mean; by default read off its class.
        first: how many rows of a stream to read, which has no length and no positions.
        checkpoints: directories that the trainer saved on its way, such as ``out/checkpoint-500``: scores are then
            means over the models in them, with the recipe of each. They are loaded into the trainer's model, one
            after the other, which has its own weights again afterwards.
        **given: what `whence.attribute` takes beside: ``params``, ``accuracy``, ``run_dir`` and so on.

    Raises:
        ModelError: the trainer's loss is not the task's.
    """
    trainers = list(trainer) if isinstance(trainer, (list, tuple)) else [trainer]
    if not trainers:
        raise OptionError("there are no trainers in the list; give at least one")
    for each in trainers:
        if not all(hasattr(each, name) for name in ("model", "args", "train_dataset")):
            raise ModelError(
                f"trainer is a {type(each).__name__}; give a transformers.Trainer, or one of TRL's"
            )
    models = [each.model for each in trainers]
    for model in models:
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the trainer's model is a {type(model).__name__}; give a trainer that holds one"
            )
    if isinstance(checkpoints, (str, Path)) or (checkpoints and len(trainers) > 1):
        raise OptionError("checkpoints must be a list of directories, and of one trainer")
    several, trainer, model = isinstance(trainer, (list, tuple)), trainers[0], models[0]
    tokenizer = getattr(trainer, "processing_class", None)
    chosen = (_preference(trainer) or task_of(model)) if task is None else task
    collated = Pairs if isinstance(chosen, Preference) else Collated
    rows = collated(_rows(trainer.train_dataset if train is None else train, first), trainer)
    with ExitStack() as evaluating:
        for each, own in zip(trainers, models, strict=True):
            evaluating.enter_context(_evaluating(own))
            _check_loss(each, own, chosen, rows)
        asked: Any = models if several else model
        if checkpoints:
            evaluating.enter_context(_restored(model))
            asked = {str(path): partial(_at, model, Path(path)) for path in checkpoints}
            given.setdefault("training", [str(path) for path in checkpoints])
        recipes = [_recipe(each, own) for each, own in zip(trainers, models, strict=True)]
        given.setdefault("training", recipes if several else recipes[0])
        return attribute_model(
            asked,
            rows,
            _asked(queries, trainer, chosen, tokenizer),
            task=chosen,
            tokenizer=tokenizer,
            class_names=_class_names(model, chosen),
            **given,
        )


class Collated:
    """Rows as the trainer's collator makes examples of them, one at a time.

    Args:
        rows: of the trainer's data.
        trainer: whose collator it is.
    """

    def __init__(self, rows: Any, trainer: Any, contrasts: Sequence[Any] = ()) -> None:
        self.rows, self._collate = rows, trainer.data_collator
        #: As queries, what each is compared with; see `whence.Questions`.
        self.contrasts = contrasts if any(other is not None for other in contrasts) else None
        self._kept = _kept_columns(trainer)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        """What a field says of every row, before the collator."""
        rows = [self.rows[index] for index in range(len(self))]
        if not any(isinstance(row, Mapping) and name in row for row in rows):
            raise DataError(f"the trainer's data have no field {name!r}")
        return [row.get(name) for row in rows]

    def batch(self, index: int) -> Mapping[str, Any]:
        """What the collator makes of one row."""
        row = self.rows[index]
        if isinstance(row, Mapping):
            row = self.of_use(row)
        found: Mapping[str, Any] = self._collate([row])
        return found

    def of_use(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns of a row that the collator is given."""
        if self.contrasts is not None:
            row = {name: row[name] for name in row if name != "contrast"}
        return row if self._kept is None else {name: row[name] for name in row if name in self._kept}

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        example = {}
        for name, value in self.batch(index).items():
            if not isinstance(value, Tensor) or name in _FLASH:
                continue
            if not value.ndim or value.shape[0] != 1:
                raise DataError(
                    f"the trainer's collator turns row {index} into {name!r} of shape {tuple(value.shape)}; it must "
                    "give a batch of one for one row"
                )
            example[name] = value[0]
        return example


class Pairs(Collated):
    """Rows of a trainer of preferences, as `Preference` reads them. Of each, the reference is asked once."""

    def __init__(self, rows: Any, trainer: Any) -> None:
        super().__init__(rows, trainer)
        self._trainer, self._references = trainer, dict[int, float]()

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        batch = self.batch(index)
        fields: dict[str, Tensor] = {}
        for row, side in enumerate(("chosen", "rejected")):
            real = batch["attention_mask"][row] != 0
            ids = batch["input_ids"][row][real]
            asked = batch["completion_mask"][row][real] != 0
            fields |= {f"{side}_ids": ids, f"{side}_labels": ids.masked_fill(~asked, IGNORED)}
        if index not in self._references:
            self._references[index] = self._reference(batch)
        return fields | {"reference": torch.tensor(self._references[index], dtype=torch.float64)}

    def _reference(self, batch: Mapping[str, Any]) -> float:
        trainer = self._trainer
        if "ref_chosen_logps" in batch:
            return float(batch["ref_chosen_logps"]) - float(batch["ref_rejected_logps"])
        reference = trainer.model if trainer.ref_model is None else trainer.ref_model
        device = next(reference.parameters()).device
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        chosen, rejected = trainer.compute_ref_log_probs(reference, inputs)
        return float(chosen) - float(rejected)

    def exhibit(self, index: int) -> Exhibit:
        """The prompt, and both completions."""
        fields, reader = self[index], self._trainer.processing_class
        sides = []
        for side in ("chosen", "rejected"):
            asked = fields[f"{side}_labels"] != IGNORED
            sides.append(reader.decode(fields[f"{side}_ids"][asked].tolist()))
        prompt = reader.decode(fields["chosen_ids"][fields["chosen_labels"] == IGNORED].tolist())
        return Exhibit(id=str(index), prompt=prompt, text=sides[0], note=f"rejected: {sides[1]}")


class KeepTraining(_Callback):  # type: ignore[misc]  # transformers has no types
    """Writes into every checkpoint how far training has come: the mean of all its rates, and its steps.

    With it ``training="checkpoint-500"`` is exact whatever was logged, for optimizers whose state is not saved, too.

    Example:
        >>> trainer = transformers.Trainer(model, callbacks=[KeepTraining()], ...)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._total = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the checkpoint that training resumes from, if it does."""
        self._total = 0.0
        if state.global_step:
            found = Path(args.output_dir) / f"checkpoint-{state.global_step}" / KEPT
            if found.is_file():
                kept = json.loads(found.read_text("utf-8"))
                self._total = float(kept["rate"]) * int(kept["steps"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the rate that the step will be taken with."""
        groups = getattr(kwargs.get("optimizer"), "param_groups", None)
        if groups:
            self._total += float(groups[0]["lr"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Into the checkpoint that was just written."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if directory.is_dir() and state.global_step:
            kept = {
                "rate": self._total / state.global_step,
                "steps": state.global_step,
                "weight_decay": args.weight_decay,
                "optimizer": _optimizer(args),
            }
            (directory / KEPT).write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


# --- data --------------------------------------------------------------------------------------------------------


def _rows(data: Any, first: int | None) -> Any:
    if data is None:
        raise DataError("the trainer has no training data; give them as train=")
    if first is not None and first < 1:
        raise OptionError(f"first is {first}; it is a number of rows, at least 1")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return data if first is None else [data[index] for index in range(min(first, len(data)))]
    if first is None:
        raise DataError(
            f"the training data are a {type(data).__name__}, a stream without length and positions; say how many of "
            "its rows to read, as first=10_000, or give a data set that can be indexed as train="
        )
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"the training data are a {type(data).__name__}; give a data set, or a stream of rows"
        )
    return list(islice(iter(data), first))


def _kept_columns(trainer: Any) -> set[str] | None:
    """The columns that the trainer hands to its collator; None for all."""
    if not getattr(trainer.args, "remove_unused_columns", False):
        return None
    trainer._set_signature_columns_if_needed()
    return set(trainer._signature_columns)


def _asked(queries: Any, trainer: Any, task: Task, tokenizer: Any) -> Any:
    if isinstance(queries, (Mapping, str)) or not isinstance(queries, Sequence) or not queries:
        raise DataError('queries must be a list, even if there is only one: [{"prompt": …, "completion": …}]')
    if isinstance(task, Preference):
        return Pairs(_tokenized_pairs(queries, trainer), trainer)
    first = queries[0]
    words = isinstance(first, Mapping) and not {"input_ids", "pixel_values"} & set(first)
    if not (words and isinstance(task, LanguageModeling)):
        return Collated(list(queries), trainer, contrasts=[_contrast(query) for query in queries])
    if tokenizer is None:
        raise DataError("the queries are texts, and the trainer has no tokenizer (processing_class)")
    records = RowList([_as_row(query) for query in queries], name="query")
    limit = context_length(trainer.model.config)
    return language_queries(records, tokenizer, task, max_length=limit)


def _contrast(query: Any) -> Any:
    """What a query is compared with, where it says so."""
    return query.get("contrast") if isinstance(query, Mapping) else None


def _tokenized_pairs(queries: Sequence[Any], trainer: Any) -> Any:
    """Queries as the trainer makes rows of its data."""
    for position, query in enumerate(queries):
        if not isinstance(query, Mapping) or not {"chosen", "rejected"} <= set(query):
            found = sorted(query) if isinstance(query, Mapping) else type(query).__name__
            raise DataError(
                f"query {position} has {found}; the trainer trained on preferences, so a query is a pair: "
                '{"prompt": …, "chosen": …, "rejected": …}'
            )
    if all("prompt_ids" in query for query in queries):
        return list(queries)
    datasets = load_library("datasets", "hf", "to read pairs")
    rows = datasets.Dataset.from_list([dict(query) for query in queries])
    made = trainer._prepare_dataset(rows, trainer.processing_class, trainer.args, "queries")
    if len(made) != len(queries):
        raise DataError(
            f"the trainer left out {len(queries) - len(made)} of {len(queries)} queries: their prompts fill its "
            "max_length. Ask with shorter prompts"
        )
    return [made[position] for position in range(len(made))]


def _as_row(query: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt and a completion that are lists of messages are one conversation."""
    prompt, completion = query.get("prompt"), query.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return {"messages": [*prompt, *completion]}
    return query


def _class_names(model: nn.Module, task: Task) -> list[str] | None:
    names = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(task, LanguageModeling) or not isinstance(names, Mapping):
        return None
    return [str(names[number]) for number in sorted(names)]


# --- model -------------------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and its modules in their own afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """The model's weights as they are now, once more afterwards."""
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(before[name])


def _at(model: nn.Module, directory: Path) -> nn.Module:
    """The trainer's model with the weights that it had when this directory was written.

    No copy of it: a trainer may have replaced its forward by one that knows the model itself, not its copy.
    """
    safetensors = load_library("safetensors.torch", "hf", "to read weights")
    adapter = directory / "adapter_model.safetensors"
    try:
        if adapter.is_file():
            peft = load_library("peft", "hf", "to load an adapter")
            told = peft.set_peft_model_state_dict(model, safetensors.load_file(adapter))
        elif (directory / "model.safetensors.index.json").is_file():
            told = transformers.trainer_utils.load_sharded_checkpoint(model, str(directory))
        else:
            safetensors.load_model(model, directory / "model.safetensors")
            told = None
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the weights in {directory} cannot be loaded into the trainer's model ({error}); name directories that "
            "this trainer saved"
        ) from error
    if told is not None and told.unexpected_keys:
        raise ModelError(
            f"{directory} has weights of another model: {told.unexpected_keys[0]!r} is not in it"
        )
    return model


def _preference(trainer: Any) -> Preference | None:
    """The task of TRL's `DPOTrainer`; refuses losses that are not direct preference optimisation's. None of others."""
    if not any(kind.__name__ == "DPOTrainer" for kind in type(trainer).__mro__):
        return None
    arguments, plain = (
        trainer.args,
        {"f_divergence_type": "reverse_kl", "ld_alpha": None, "use_weighting": False},
    )
    given = getattr(arguments, "loss_type", None)
    kinds = [given] if isinstance(given, str) else list(given or ())
    odd = [f"loss_type={kinds}"] if kinds != ["sigmoid"] else []
    for name, value in plain.items():
        found = getattr(arguments, name, value)
        if getattr(found, "value", found) != value:
            odd.append(f"{name}={found!r}")
    weights = getattr(arguments, "loss_weights", None)
    odd += [f"loss_weights={weights}"] if weights not in (None, [1.0]) else []
    if odd:
        raise ModelError(
            f"the trainer's loss is a variant ({', '.join(odd)}) of direct preference optimisation; "
            "whence.Preference is the loss of loss_type='sigmoid' alone. Give a task with this loss as task="
        )
    if not hasattr(trainer, "compute_ref_log_probs") or not hasattr(trainer, "ref_model"):
        raise ModelError("this version of TRL does not tell what its reference model says; use 1.0 or later")
    return Preference(beta=float(trainer.beta))


def _recipe(trainer: Any, model: nn.Module) -> Training | None:
    """The optimizer's state where the trainer still has it, with the rates that were logged; None without training."""
    steps = int(getattr(trainer.state, "global_step", 0))
    if not steps:
        return None
    history = None
    if any("learning_rate" in row for row in trainer.state.log_history):
        history = Training.of_history({"global_step": steps, "log_history": trainer.state.log_history})
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if isinstance(optimizer, torch.optim.Optimizer) and any(
        "exp_avg_sq" in kept for kept in optimizer.state.values()
    ):
        found = Training.read(optimizer, model)
        return found if history is None else replace(found, rate=history.rate, steps=steps)
    kind = _optimizer(trainer.args)
    if history is None or kind not in ("adam", "sgd"):
        return None  # of others too little is known
    if kind == "adam":
        return history
    momentum = float(optimizer.param_groups[0].get("momentum", 0.0)) if optimizer is not None else 0.0
    return replace(history, adaptive=False, momentum=momentum)


def _optimizer(args: Any) -> str:
    """The kind of optimizer that the arguments name: "adam", "sgd", or another one's own name."""
    name = str(getattr(args.optim, "value", args.optim))
    return next((kind for kind in ("adam", "sgd") if name.startswith(kind)), name)


def _telling(rows: Collated) -> list[int]:
    """The first row, the last one, and some between that are unlike them, so that each kind of row is among them.

    A loss may weigh classes, sources or columns, or treat long rows otherwise. So of rows spread over the data what can
    be told of each is counted (`_marks`), and from the rarest on a row is taken for everything that no other row has.
    """
    count = len(rows)
    looked = torch.linspace(0, count - 1, min(count, _LOOKED_AT), dtype=torch.float64).long().tolist()
    marks = {position: set(_marks(rows, position)) for position in looked}
    values: dict[str, set[Any]] = {}
    for name, value in set().union(*marks.values()):
        values.setdefault(name, set()).add(value)
    often = Counter(
        mark for found in marks.values() for mark in found if len(values[mark[0]]) <= _KINDS
    )  # what nearly every row has of its own, such as a name, tells of no kind
    chosen = [looked[0], *({looked[-1]} - {looked[0]})]
    for mark, _ in sorted(often.items(), key=lambda item: (item[1], str(item[0]))):
        if len(chosen) < _COMPARED and not any(mark in marks[position] for position in chosen):
            chosen.append(next(position for position in looked if mark in marks[position]))
    return chosen


def _marks(rows: Collated, position: int) -> Iterator[tuple[str, Any]]:
    """What can be told of a row: which columns it has, single values, lengths to a factor of two."""
    row, example = rows.rows[position], rows[position]
    columns = rows.of_use(row).items() if isinstance(row, Mapping) else ()
    for name, value in (*columns, *((f"{name} as collated", value) for name, value in example.items())):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            yield name, value
        elif hasattr(value, "__len__"):
            yield f"length of {name}", len(value).bit_length()
        if isinstance(value, Tensor) and value.dtype == torch.long:
            yield f"left out of {name}", int((value == _LEFT_OUT).sum()).bit_length()


def _check_loss(trainer: Any, model: nn.Module, task: Task, rows: Collated) -> None:
    """Refuse a trainer whose loss of an example is not the task's mean over its terms, as far as some rows tell."""
    positions = _telling(rows)
    device = next(model.parameters()).device
    half = getattr(trainer.args, "bf16", False) or getattr(trainer.args, "fp16", False)
    half = half or next(model.parameters()).element_size() < 4
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))  # which TRL's trainers add to
    with torch.no_grad():
        ours, theirs = [], []
        for position in positions:
            batch = task.collate([rows[position]]).to(device)
            outputs = task.outputs(model, batch)
            task.check(outputs, batch)
            ours.append(float(task.query_losses(outputs, batch)))
            inputs = {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in rows.batch(position).items()
            }
            theirs.append(float(trainer.compute_loss(model, inputs)))
    if metrics is not None:
        trainer._metrics = metrics
    for position, own, other in zip(positions, ours, theirs, strict=True):
        if not abs(own - other) <= (_HALF_TOLERANCE if half else _TOLERANCE) * max(abs(other), 0.1):
            raise ModelError(
                f"the trainer's loss of row {position} is {other:.6g}, that of {type(task).__name__} is {own:.6g}: it "
                "trains on another loss (label smoothing, weights, preferences or its own compute_loss). Give the task "
                "that has this loss as task=, such as whence.ConvexLoss"
            )
