"""`Training`: how a model came to be, which tells how much damping is right.

Training for a time τ = Σ rates moves a parameter against a curvature μ as far as ``(1 - e^(-τμ))/μ`` lets it, and
``1/(μ + λ)`` with λ of about 1/τ is that filter to within 30%. Adam divides each coordinate's rate by √v̂, so that for
it the damping is ``λ √v̂``: diagonal, in the optimizer's own geometry. docs/math.md, "Damping from the training recipe".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.arguments import check_fields
from whence.errors import OptionError
from whence.runs.fingerprint import of_value
from whence.sources.files import refusing
from whence.vectors import ParamVector

__all__ = ["KEPT", "Training"]

#: What `whence.hf.KeepTraining` writes into a checkpoint.
KEPT = "whence_training.json"

#: Mean of the rate over training, in units of its first value.
_SCHEDULES = {"constant": 1.0, "constant_with_warmup": 1.0, "linear": 0.5, "cosine": 0.5}
_NUMBERS = ("rate", "steps", "momentum", "weight_decay")
#: Optimizers by name, and whether each coordinate has a rate of its own.
_OPTIMIZERS = {"sgd": False, "adam": True, "adamw": True}


@dataclass(frozen=True)
class Training:
    """What is known of a training.

    Attributes:
        rate: the mean learning rate over all steps.
        steps: of the optimizer.
        momentum: of SGD; 0 without, and for Adam, whose momentum is an average.
        weight_decay: as the optimizer was told.
        adaptive: whether each coordinate has a rate of its own, as with Adam.
        root_moment: Adam's √v̂ at the end, with its ε; where it is adaptive and this is not known, it is measured anew.

    Example:
        >>> Training.read({"optimizer": "sgd", "rate": 0.1, "steps": 500, "momentum": 0.5}).time
        100.0
    """

    rate: float
    steps: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    adaptive: bool = False
    root_moment: ParamVector | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, fine in (
            ("rate", self.rate, self.rate > 0),
            ("steps", self.steps, self.steps >= 1),
            ("momentum", self.momentum, 0 <= self.momentum < 1),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0),
        ):
            if not (math.isfinite(value) and fine):
                raise OptionError(f"the training's {name} is {value}; check what was given as training")

    @property
    def time(self) -> float:
        """τ: the sum of all rates, with momentum's speed-up."""
        return self.rate * self.steps / (1 - self.momentum)

    @property
    def identity(self) -> str:
        """What a run is recognised by."""
        moment = "" if self.root_moment is None else of_value(self.root_moment)
        return f"{self.rate:.9g} {self.steps} {self.momentum:g} {self.weight_decay:g} {self.adaptive} {moment}".strip()

    @classmethod
    def read(cls, source: Any, model: nn.Module | None = None) -> Training:
        """From whatever is at hand.

        Args:
            source: the optimizer after training, or its ``state_dict()``; a `transformers.TrainingArguments`; a
                directory that `transformers.Trainer` saved, or its ``trainer_state.json``; numbers, as
                ``{"optimizer": "adam", "rate": 1e-3, "steps": 880}`` with ``momentum``, ``weight_decay`` and
                ``schedule`` (constant, linear or cosine) where they apply, also as text,
                ``"optimizer=adam,rate=1e-3,steps=880"``.
            model: whose parameters the optimizer's state belongs to.

        Raises:
            OptionError: it says neither rate nor steps, or its state belongs to other parameters.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, torch.optim.Optimizer):
            return cls._of_groups(source.param_groups, source.state, _names(model, source))
        if isinstance(source, Mapping) and "param_groups" in source:
            return cls._of_state_dict(source, model)
        if isinstance(source, Mapping):
            return cls._of_numbers(source)
        if isinstance(source, (str, Path)):
            return cls._of_text(str(source), model)
        if hasattr(source, "learning_rate") and hasattr(source, "max_steps"):
            return cls._of_arguments(source)
        raise OptionError(
            f"training is a {type(source).__name__}; give the optimizer, its state_dict, TrainingArguments, a "
            "checkpoint of Trainer, or numbers: {'optimizer': 'adam', 'rate': 1e-3, 'steps': 880}"
        )

    @classmethod
    def _of_numbers(cls, numbers: Mapping[str, Any]) -> Training:
        schedule = str(numbers.get("schedule", "constant"))
        optimizer = str(numbers.get("optimizer", "")).lower()
        unknown = [name for name in numbers if name not in (*_NUMBERS, "schedule", "optimizer")]
        known = schedule in _SCHEDULES and optimizer in _OPTIMIZERS and not unknown
        if not known or "rate" not in numbers or "steps" not in numbers:
            raise OptionError(
                f"training is {dict(numbers)}; give optimizer ({', '.join(_OPTIMIZERS)}), rate and steps, and "
                f"momentum, weight_decay and schedule ({', '.join(_SCHEDULES)}) where they apply"
            )
        try:
            rate, steps, momentum, decay = (float(numbers.get(name, 0.0)) for name in _NUMBERS)
        except (TypeError, ValueError) as error:
            raise OptionError(f"training is {dict(numbers)}; its values must be numbers ({error})") from None
        return cls(rate * _SCHEDULES[schedule], int(steps), momentum, decay, _OPTIMIZERS[optimizer])

    @classmethod
    def _of_text(cls, text: str, model: nn.Module | None) -> Training:
        path = Path(text)
        if path.is_dir() or path.is_file():
            found = path / "trainer_state.json" if path.is_dir() else path
            try:
                with refusing(
                    OptionError, f"{found} does not tell of a training", "give numbers in its place"
                ):
                    return cls._of_checkpoint(path, model) if path.is_dir() else cls.of_history(_json(path))
            except OptionError as error:
                raise error if str(path) in str(error) else OptionError(f"{found}: {error}") from error
        pairs = [part.partition("=") for part in text.split(",")]
        if not all(sign for _, sign, _ in pairs):
            raise OptionError(
                f"training is {text!r}, which is no file or directory; write optimizer=adam,rate=1e-3,steps=880, "
                "or name a checkpoint of Trainer or its trainer_state.json"
            )
        return cls._of_numbers({name.strip(): value.strip() for name, _, value in pairs})

    @classmethod
    def _of_arguments(cls, arguments: Any) -> Training:
        if arguments.max_steps < 1:
            raise OptionError(
                "these TrainingArguments count epochs, not steps; give the checkpoint's directory or its "
                "trainer_state.json, or numbers: {'optimizer': …, 'rate': …, 'steps': …}"
            )
        schedule = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
        optimizer = str(getattr(arguments.optim, "value", arguments.optim))
        if schedule not in _SCHEDULES or not optimizer.startswith(("adam", "sgd")):
            raise OptionError(
                f"these TrainingArguments name the optimizer {optimizer} and the schedule {schedule}, of which "
                "too little is known; give numbers with the mean rate: {'optimizer': …, 'rate': …, 'steps': …}"
            )
        return cls(
            rate=arguments.learning_rate * _SCHEDULES[schedule],
            steps=arguments.max_steps,
            weight_decay=arguments.weight_decay,
            adaptive=optimizer.startswith("adam"),
        )

    @classmethod
    def of_history(cls, state: Mapping[str, Any]) -> Training:
        """`trainer_state.json`: the rates that were logged stand for the steps since the one before."""
        logged = [
            (row["step"], row["learning_rate"])
            for row in state.get("log_history", ())
            if "learning_rate" in row
        ]
        if not logged or not state.get("global_step"):
            raise OptionError(
                "the trainer's state has no learning rate in its log; give numbers instead: "
                "{'optimizer': …, 'rate': …, 'steps': …}"
            )
        before, total = 0, 0.0
        for step, rate in logged:
            total, before = total + (step - before) * rate, step
        return cls(
            rate=total / before, steps=state["global_step"], adaptive=True
        )  # Trainer's own default is AdamW

    @classmethod
    def _of_checkpoint(cls, directory: Path, model: nn.Module | None) -> Training:
        """What `transformers.Trainer` saves beside a model."""
        kept = directory / KEPT
        history = (
            cls._of_numbers(_json(kept))
            if kept.is_file()
            else cls.of_history(_json(directory / "trainer_state.json"))
        )
        path = directory / "optimizer.pt"
        if not path.is_file() or model is None:
            return history
        with refusing(OptionError, f"{path} is no optimizer's state", "save it again, or remove it"):
            found = cls._of_state_dict(torch.load(path, map_location="cpu", weights_only=True), model)
        return replace(found, rate=history.rate, steps=history.steps)

    @classmethod
    def _of_state_dict(cls, saved: Mapping[str, Any], model: nn.Module | None) -> Training:
        """Parameters are numbered there: by name where these were saved, else in the model's order."""
        if model is None:
            raise OptionError(
                "an optimizer's state_dict belongs to a model's parameters; give the model, too"
            )
        groups = saved["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        named = [name for group in groups for name in group.get("param_names", ())]
        orders = [named] if named else _orders(model, len(groups))
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        for order in orders:
            if len(order) == len(numbers) and all(
                shapes.get(name) == tuple(saved["state"][number]["exp_avg_sq"].shape)
                for number, name in zip(numbers, order, strict=True)
                if "exp_avg_sq" in saved["state"].get(number, {})
            ):
                return cls._of_groups(groups, saved["state"], dict(zip(numbers, order, strict=True)))
        raise OptionError(
            f"the optimizer's state has {len(numbers)} parameters that do not match the model's {len(shapes)}; give "
            "the optimizer itself"
        )

    @classmethod
    def _of_groups(
        cls, groups: Sequence[Mapping[str, Any]], state: Any, names: Mapping[Any, str]
    ) -> Training:
        """Groups may differ in rate; their mean, weighted by parameters' tensors, stands for all."""
        rates, decays, moments, steps = list[float](), list[float](), dict[str, Tensor](), 0
        for group in groups:
            # A scheduler keeps the first rate; falling to the last, linearly or as a cosine, their mean is exact.
            rates += [0.5 * (float(group.get("initial_lr", group["lr"])) + float(group["lr"]))] * len(
                group["params"]
            )
            decays.append(float(group.get("weight_decay", 0.0)))
            for parameter in group["params"]:
                kept = state.get(parameter, {})
                steps = max(steps, int(kept.get("step", 0)))
                if "exp_avg_sq" in kept:
                    corrected = kept["exp_avg_sq"] / (1 - group["betas"][1] ** int(kept["step"]))
                    moments[names[parameter]] = corrected.sqrt() + group["eps"]
        if not steps:
            raise OptionError(
                "the optimizer does not say how many steps it took (SGD keeps no count); give numbers: "
                "{'optimizer': 'sgd', 'rate': …, 'steps': …}"
            )
        if not moments:
            raise OptionError(
                "the optimizer has a rate of its own for every coordinate, as RMSprop and Adafactor have, and keeps it "
                "in a way that is not read here; give numbers: {'optimizer': 'adam', 'rate': …, 'steps': …}"
            )
        return cls(
            rate=sum(rates) / len(rates),
            steps=steps,
            momentum=0.0 if moments else float(groups[0].get("momentum", 0.0)),
            weight_decay=max(decays),
            adaptive=bool(moments),
            root_moment=ParamVector(moments) if moments else None,
        )


def _names(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    if model is None:
        raise OptionError("an optimizer's state belongs to a model's parameters; give the model, too")
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise OptionError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; give "
                    "the optimizer that trained this very model, or its state_dict"
                )
    return names


def _orders(model: nn.Module, groups: int) -> list[list[str]]:
    """How an optimizer may have numbered the model's parameters: as they stand, or as Trainer does, decayed first."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if groups == 1:
        return [names]
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
    decayed = [name for name in names if name not in norms and not name.endswith("bias")]
    return [decayed + [name for name in names if name not in decayed]]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not the trainer_state.json of a training ({error})") from None
    if not isinstance(found, dict):
        raise OptionError(f"{path} is not the trainer_state.json of a training")
    return found
