"""Trainers, adapters and chats, with the real libraries on tiny models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence
from small import generator
from tests.tiny_hf import CHAT, byte_level
from whence.errors import DataError, ModelError, OptionError
from whence.model.selection import select_parameters
from whence.sources import load_model
from whence.sources.models import task_of
from whence.training import KEPT, Training

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from whence import hf  # noqa: E402

ROWS = [
    {"prompt": f"the {animal} sat on the", "completion": f" {place}"}
    for animal, place in zip(
        ["cat", "dog", "cat", "mat", "log", "dog"] * 2, ["mat", "log", "log"] * 4, strict=True
    )
]
QUERY = [{"prompt": "the cat sat on the", "completion": " mat"}]


def tokenizer(*, chat: bool = False) -> Any:
    made = byte_level()
    made.pad_token = made.eos_token
    if chat:
        made.chat_template = CHAT
    return made


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attn_implementation="eager", bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def arguments(kind: Any, place: Path, **given: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(place), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "bf16": False, "seed": 0,
    }  # fmt: skip
    return kind(**(settings | given))


def tuned(place: Path, *, model: Any = None, rows: Any = None, chat: bool = False, **given: Any) -> Any:
    """An `SFTTrainer` after a few steps."""
    callbacks = given.pop("callbacks", None)
    config = given.pop("peft_config", None)
    trainer = trl.SFTTrainer(
        llama() if model is None else model,
        args=arguments(trl.SFTConfig, place, max_length=48, **given),
        train_dataset=datasets.Dataset.from_list(ROWS if rows is None else rows),
        processing_class=tokenizer(chat=chat),
        callbacks=callbacks,
        peft_config=config,
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tuned(tmp_path_factory.mktemp("sft"))


def by_hand(trainer: Any, rows: list[dict[str, str]]) -> list[dict[str, torch.Tensor]]:
    """Prompts that are not predicted, with completions and the end that are."""
    made, reader = [], trainer.processing_class
    for row in rows:
        prompt, whole = (
            reader(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"])
        )
        ids = torch.tensor([*whole, reader.eos_token_id])
        labels = ids.clone()
        labels[: len(prompt)] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def test_what_the_trainer_trained_on_is_what_is_scored(trainer: Any) -> None:
    result = hf.attribute(trainer, QUERY, damping=0.1)
    assert trainer.model.training  # as it was left
    trainer.model.eval()
    task, recipe = whence.LanguageModeling(), Training.read(trainer.optimizer, trainer.model)
    query = [
        task.query(
            *(trainer.processing_class(QUERY[0][part])["input_ids"] for part in ("prompt", "completion"))
        )
    ]
    direct = whence.attribute(
        trainer.model, by_hand(trainer, ROWS), query, task=task, damping=0.1, training=recipe
    )
    trainer.model.train()
    torch.testing.assert_close(result.scores, direct.scores, rtol=1e-4, atol=1e-6)
    assert result.queries[0].text == " mat"


def test_the_recipe_is_the_trainers(trainer: Any) -> None:
    recipe = hf._recipe(trainer, trainer.model)
    assert recipe is not None
    assert recipe.steps == 4
    assert recipe.adaptive
    assert recipe.root_moment is not None
    logged = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert recipe.rate == pytest.approx(sum(logged) / 4)


def test_the_recipe_of_sgd_is_not_taken_for_adams(tmp_path: Path) -> None:
    plain = tuned(tmp_path, optim="sgd", callbacks=[hf.KeepTraining()], save_strategy="steps", save_steps=4)
    recipe = hf._recipe(plain, plain.model)
    assert recipe is not None
    assert not recipe.adaptive
    assert json.loads((tmp_path / "checkpoint-4" / KEPT).read_text())["optimizer"] == "sgd"
    plain.args.optim = "adafactor"
    assert hf._recipe(plain, plain.model) is None
    assert hf._optimizer(plain.args) == "adafactor"


def test_packed_sequences_are_those_of_the_training(tmp_path: Path) -> None:
    packed = tuned(tmp_path, rows=[{"text": row["prompt"] + row["completion"]} for row in ROWS], packing=True)
    rows = hf.Collated(packed.train_dataset, packed)
    assert "position_ids" in rows[0]
    assert int((rows[0]["position_ids"] == 0).sum()) > 1  # several texts in a row
    result = hf.attribute(packed, [{"text": "the cat sat on the mat"}], damping=1.0)
    assert result.scores.shape == (1, len(packed.train_dataset))


def test_chats_are_predicted_where_the_assistant_speaks(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}],
         "completion": [{"role": "assistant", "content": row["completion"].strip()}]}
        for row in ROWS
    ]  # fmt: skip
    chats = tuned(tmp_path, rows=rows, chat=True)
    asked: list[dict[str, Any]] = [rows[0], {"messages": rows[0]["prompt"] + rows[0]["completion"]}]
    result = hf.attribute(chats, asked, damping=1.0)
    torch.testing.assert_close(result.scores[0], result.scores[1])
    assert "mat" in (result.queries[0].text or "")


def test_another_loss_is_refused(tmp_path: Path) -> None:
    ids = [tokenizer()(row["prompt"])["input_ids"] for row in ROWS]
    smoothed = transformers.Trainer(
        llama(),
        arguments(transformers.TrainingArguments, tmp_path, label_smoothing_factor=0.3),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        processing_class=tokenizer(),
    )
    with pytest.raises(ModelError, match="trains on another loss"):
        hf.attribute(smoothed, QUERY)
    assert smoothed.model.training
    smoothed.label_smoother = None
    hf.attribute(smoothed, QUERY, damping=1.0)


class Particular(transformers.Trainer):  # type: ignore[misc]  # has no types
    """Its loss is twice the usual one on some rows."""

    kind: Any

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        inputs = dict(inputs)
        doubled = self.kind(inputs)
        inputs.pop("source", None)
        return super().compute_loss(model, inputs, *args, **given) * (2 if doubled else 1)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (lambda inputs: False, False),
        (lambda inputs: inputs["source"].item() == 7, True),  # as rows of one source are weighed
        (lambda inputs: inputs["labels"].shape[1] > 40, True),
        (lambda inputs: int((inputs["labels"] == -100).sum()) > 10, True),
    ],
    ids=["never", "source", "length", "masks"],
)
def test_a_loss_that_is_another_on_a_few_rows_is_refused(kind: Any, refused: bool, tmp_path: Path) -> None:
    """On one of 100 rows, in the middle; all rows have a column with a value of their own beside."""
    rows = []
    for number in range(100):
        ids = torch.randint(2, 300, (48 if number == 41 else 12,), generator=generator(number))
        labels = ids.clone()
        if number == 67:
            labels[:11] = -100
        one = {"input_ids": ids, "labels": labels, "source": torch.tensor(7 if number == 53 else number % 3)}
        rows.append({**one, "row": torch.tensor(number)})

    def collate(found: list[Any]) -> dict[str, Any]:
        return {name: torch.stack([row[name] for row in found]) for name in ("input_ids", "labels", "source")}

    settings = arguments(transformers.TrainingArguments, tmp_path, remove_unused_columns=False)
    trainer = Particular(llama(), settings, train_dataset=rows, data_collator=collate)
    trainer.kind = kind
    check = partial(
        hf._check_loss, trainer, trainer.model.eval(), whence.LanguageModeling(), hf.Collated(rows, trainer)
    )
    if not refused:
        check()
        return
    with pytest.raises(ModelError, match=r"trainer's loss of row (41|53|67) "):
        check()


def test_a_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=3, hidden_dropout_prob=0.0, attn_implementation="eager",
        id2label={0: "cats", 1: "dogs", 2: "logs"},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    rows = [{**tokenizer()(row["prompt"]), "label": k % 3, "source": "a book"} for k, row in enumerate(ROWS)]
    trainer = transformers.Trainer(
        model,
        arguments(transformers.TrainingArguments, tmp_path),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    result = hf.attribute(trainer, rows[:2])
    assert result.scores.shape == (2, 12)
    assert result.queries[1].label == "dogs"
    assert "prompt" not in hf.Collated(trainer.train_dataset, trainer)[0]
    compared = hf.attribute(trainer, [rows[0] | {"contrast": 2}], damping=1.0, groups="source")
    assert compared.queries[0].asked == "why “cats” rather than “logs”"
    assert compared.groups().sizes.tolist() == [12]


def test_queries_may_have_a_contrast_and_rows_a_group(trainer: Any) -> None:
    query = [QUERY[0] | {"contrast": " log"}]
    animals = [row["prompt"].split()[1] for row in ROWS]
    result = hf.attribute(trainer, query, damping=1.0, groups=animals)
    assert result.queries[0].contrast == " log"
    assert result.queries[0].asked == "why “mat” rather than “log”"
    alone = [hf.attribute(trainer, [{"prompt": QUERY[0]["prompt"], "completion": said}], damping=1.0)
             for said in (" mat", " log")]  # fmt: skip
    difference = alone[0].query_losses - alone[1].query_losses
    torch.testing.assert_close(result.query_losses, difference, rtol=1e-4, atol=1e-5)
    expected = alone[0].scores - alone[1].scores
    assert float((result.scores - expected).norm() / expected.norm()) < 0.3
    assert result.groups().names == ("cat", "dog", "mat", "log")
    assert result.groups().sizes.tolist() == [animals.count(name) for name in ("cat", "dog", "mat", "log")]


def test_streams_need_a_number(trainer: Any, tmp_path: Path) -> None:
    stream = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(DataError, match="first=10_000"):
        hf.attribute(trainer, QUERY, train=stream)
    result = hf.attribute(trainer, QUERY, train=stream, first=5, damping=0.1)
    assert result.scores.shape == (1, 5)
    with pytest.raises(DataError, match="must be a list"):
        hf.attribute(trainer, QUERY[0])


def test_checkpoints_keep_the_rates(tmp_path: Path) -> None:
    kept = tuned(
        tmp_path, callbacks=[hf.KeepTraining()], save_strategy="steps", save_steps=2, logging_steps=100
    )
    found = json.loads((tmp_path / "checkpoint-4" / KEPT).read_text())
    assert found["steps"] == 4
    assert found["rate"] == pytest.approx(1e-2 * (1 + 0.75 + 0.5 + 0.25) / 4)  # linear, to zero
    recipe = Training.read(tmp_path / "checkpoint-4", kept.model)
    assert recipe.rate == pytest.approx(found["rate"])
    assert recipe.root_moment is not None


# --- adapters ------------------------------------------------------------------------------------------------------


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_alone_are_attributed_to(kind: str, tmp_path: Path) -> None:
    """From the trainer, from the saved directory by name, and as loaded for inference: the same scores."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    trainer = tuned(tmp_path / "run", model=base, peft_config=CONFIGS[kind]())
    result = hf.attribute(trainer, QUERY, damping=0.1, training=None)
    trainer.save_model(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "../base"}))
    problem = load_model(tmp_path / "adapter")
    assert isinstance(task_of(problem.model), whence.LanguageModeling)
    rows = [dict(hf.Collated(trainer.train_dataset, trainer)[k]) for k in range(len(ROWS))]
    task = whence.LanguageModeling()
    query = [
        task.query(*(problem.tokenizer(QUERY[0][part])["input_ids"] for part in ("prompt", "completion")))
    ]
    named = whence.attribute(problem.model, rows, query, task=task, damping=0.1)
    torch.testing.assert_close(named.scores, result.scores, rtol=1e-3, atol=1e-6)

    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    frozen = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    chosen, trained = select_parameters(frozen), select_parameters(problem.model)
    assert list(chosen) == list(trained)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())  # nothing was switched
    inference = whence.attribute(frozen, rows, query, task=task, damping=0.1)
    torch.testing.assert_close(inference.scores, named.scores, rtol=1e-3, atol=1e-6)


def test_adapters_without_their_base_are_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), CONFIGS["lora"]())
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not name the adapter's base"):
        load_model(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "someone/base"}))
    with pytest.raises(ModelError, match="someone/base"):
        load_model(tmp_path)


def test_task_of_what_is_no_hugging_face_model() -> None:
    with pytest.raises(ModelError, match="task="):
        task_of(nn.Linear(2, 2))


def test_trainers_of_several_seeds_are_averaged(trainer: Any, tmp_path: Path) -> None:
    other = tuned(tmp_path, model=llama(1))
    result = hf.attribute([trainer, other], QUERY, damping="auto")
    alone = [hf.attribute(each, QUERY, damping="auto") for each in (trainer, other)]
    torch.testing.assert_close(result.scores, (alone[0].scores + alone[1].scores) / 2)
    assert {each.damping for each in result.checkpoints} == {each.solve.plan.damping for each in alone}
    assert trainer.model.training
    assert other.model.training


@pytest.mark.parametrize("adapter", [False, True])
def test_points_of_one_training_are_averaged(tmp_path: Path, adapter: bool) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if adapter else None
    trainer = tuned(tmp_path, peft_config=config, save_strategy="steps", save_steps=2)
    places = [tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    result = hf.attribute(trainer, QUERY, checkpoints=places)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    parts = {each.name: part for each, part in zip(result.checkpoints, result.chain_scores, strict=True)}
    last = hf.attribute(trainer, QUERY, training=str(places[1]))
    torch.testing.assert_close(parts[str(places[1])], last.scores)
    assert not torch.allclose(parts[str(places[0])], last.scores, rtol=1e-2)
    words = {each.name: each.damping_words for each in result.checkpoints}
    assert len(set(words.values())) == 2  # each with a recipe of its own
    with pytest.raises(ModelError, match=r"weights in .* cannot be loaded"):
        hf.attribute(trainer, QUERY, checkpoints=[places[0], tmp_path])
    with pytest.raises(OptionError, match="a list of directories"):
        hf.attribute(trainer, QUERY, checkpoints=str(places[0]))


@pytest.mark.parametrize(
    "trainer", [None, 5, "trainer", nn.Linear(2, 2), object(), [None]], ids=lambda each: type(each).__name__
)
def test_what_is_no_trainer_is_refused(trainer: Any) -> None:
    with pytest.raises(ModelError, match=r"give a transformers\.Trainer"):
        hf.attribute(trainer, QUERY)
