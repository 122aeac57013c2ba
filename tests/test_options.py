"""One dataclass is a function's signature, its command line and its saved configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import whence
from small import classifier
from whence import Classification, CleanOptions, Options, attribute, clean
from whence.cli import app
from whence.cli.inputs import InputOptions
from whence.errors import OptionError
from whence.options import MeasureOptions, Until
from zoo import vectors

FUNCTIONS: list[tuple[Callable[..., Any], type[MeasureOptions]]] = [
    (attribute, Options),
    (clean, CleanOptions),
]
COMMANDS = {
    "attribute": Options,
    "plan": Options,
    "clean": CleanOptions,
    "spectrum": MeasureOptions,
    "tune": MeasureOptions,
}


def commands() -> dict[str, Any]:
    group = typer.main.get_command(app)
    return dict(group.commands)  # type: ignore[attr-defined]


def offered(command: str, cls: type[Any]) -> list[Any]:
    return [option for option in fields(cls) if command != "plan" or option.metadata.get("plan", True)]


# --- the signature -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "cls"), FUNCTIONS)
def test_the_signature_shows_the_common_options(function: Callable[..., Any], cls: type[Any]) -> None:
    shown = inspect.signature(function).parameters
    for option in fields(cls):
        assert (option.name in shown) == option.metadata["common"]
        if option.name in shown:
            assert shown[option.name].default == option.default
            assert shown[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{option.name}: " in (function.__doc__ or "")
    assert "{options}" not in (function.__doc__ or "")
    assert {"damping", "seed", "run_dir"} <= set(shown)
    assert "given" not in shown


@pytest.mark.parametrize(("function", "cls"), FUNCTIONS)
def test_every_field_is_a_keyword_and_all_go_at_once(function: Callable[..., Any], cls: type[Any]) -> None:
    """All of them reach the result's settings, by keyword or as one object, keywords first."""
    data = vectors(torch.float64)
    changes = {
        "damping": "lambda_max/10",
        "seed": 3,
        "spectrum_terms": 19,
        "micro_batch": 7,
        "product": "exact",
    }
    queries = (data[:1],) if function is attribute else ()
    defaults = {option.name: option.default for option in fields(cls)}
    by_keyword = function(classifier(), data, *queries, task=Classification(), **{**defaults, **changes})
    at_once = function(
        classifier(), data, *queries, task=Classification(), options=cls(**{**changes, "seed": 4}), seed=3
    )
    assert by_keyword.settings == at_once.settings
    for name, value in changes.items():
        assert by_keyword.settings[name] == value


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("dampin", "did you mean 'damping'"),
        ("chain", "did you mean 'chains'"),
        ("spectrum_term", "'spectrum_terms'"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name: str, near: str) -> None:
    data = vectors(torch.float64)
    with pytest.raises(OptionError, match=f"no option '{name}'; .*{near}"):
        attribute(classifier(), data, data[:1], task=Classification(), **{name: 1})


def test_options_of_another_command_are_refused() -> None:
    data = vectors(torch.float64)
    with pytest.raises(OptionError, match=r"give a whence\.Options"):
        attribute(classifier(), data, data[:1], task=Classification(), options=CleanOptions())  # type: ignore[arg-type]


# --- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_an_option_of_the_command_line(command: str) -> None:
    found = {parameter.name: parameter for parameter in commands()[command].params}
    for cls in (InputOptions, COMMANDS[command]):
        for option in offered(command, cls):
            parameter = found[option.name]
            assert parameter.help == option.metadata["help"]
            if option.default is MISSING:
                continue
            assert f"--{option.name.replace('_', '-')}" in parameter.opts
            assert str(parameter.default) == str(option.default)
    if COMMANDS[command] is Options:
        assert "json" in found
    if command in ("attribute", "clean"):
        assert "--run-dir" in found["run_dir"].opts


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_them(command: str) -> None:
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    for option in offered(command, COMMANDS[command]):
        assert f"--{option.name.replace('_', '-')}" in printed


def test_plan_takes_what_shapes_it_and_nothing_else() -> None:
    own = {"json", "damping_sweep", "figure", *(each.name for each in fields(InputOptions))}
    shaping = {parameter.name for parameter in commands()["plan"].params} - own
    measuring = {each.name for each in fields(MeasureOptions)}
    assert shaping == measuring | {"damping", "solver", "accuracy", "budget", "chains", "refine", "baseline"}
    refused = CliRunner().invoke(app, ["plan", "model", "--until", "top-10 stable"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "No such option: --until" in refused.output


# --- the saved configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Options, CleanOptions])
def test_what_is_saved_is_what_numbers_and_files_depend_on(cls: type[Any]) -> None:
    options = cls()
    saved = options.saved()
    for option in fields(cls):
        assert (option.name in saved) == option.metadata["saved"]
        assert option.metadata["help"].endswith(".")
    assert is_dataclass(options)
    assert cls(**saved) == options
    with pytest.raises(AttributeError):
        options.seed = 1


def test_accuracy_is_saved_as_the_correlation_it_is() -> None:
    assert Options(accuracy="10%").saved()["accuracy"] == 0.995
    assert replace(Options(accuracy="10%"), seed=1).accuracy == 0.995


def test_phases_draw_from_the_seed_and_differ() -> None:
    def draw(seed: int, phase: int) -> float:
        return float(torch.rand(1, generator=whence.Options(seed=seed).generator(phase)))

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(seed, phase) for seed in range(3) for phase in range(3)}) == 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"spectrum_terms": 2.5}, "spectrum_terms is 2.5"),
        ({"shown": True}, "shown is True"),
        ({"part_size": -1}, "part_size is -1"),
        ({"budget": 0.5}, "budget is 0.5"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"until": "top-0 stable"}, "until is 'top-0 stable'"),
        ({"solver": "refinement"}, "'auto', 'cg' or 'lissa'"),
        ({"sampling": "all"}, "'auto', 'uniform' or 'curvature'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_asked_for(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Options(**options)


def test_until_is_read_and_written() -> None:
    assert Until.parse("top-10 stable") == Until(10, 0.95)
    assert Until.parse(str(Until(3, 0.99))) == Until(3, 0.99)
