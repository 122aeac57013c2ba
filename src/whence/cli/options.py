"""From options classes to a command line: every field of a dataclass becomes an option of the same name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from whence.cli.outcome import errors_become_messages

__all__ = ["AsJson", "guarded", "takes"]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
#: Decorates a command whose typed errors become messages and exit codes.
guarded = errors_become_messages()


def takes(
    *classes: type[Any], only: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first arguments are instances of these dataclasses, with their fields in its signature.

    Its typed errors become messages and exit codes, as those of a `guarded` command do. With ``only``, fields whose
    metadata say no to this word keep their defaults, and are not in the signature.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = {
            each.name: _parameter(cls, each)
            for cls in classes
            for each in fields(cls)
            if only is None or each.metadata.get(only, True)
        }
        signature = inspect.signature(command, eval_str=True).parameters
        own = dict(list(signature.items())[len(classes) :])

        @guarded
        def run(**given: Any) -> None:
            instances = [_instance(cls, given) for cls in classes]  # each takes its own out of what was given
            command(*instances, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [*shared.values(), *own.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(cls: type[Any], each: Field[Any]) -> inspect.Parameter:
    kind: Any = get_type_hints(cls)[each.name]
    default = each.default if each.default_factory is MISSING else each.default_factory()
    if _number_or_word(kind):
        kind, default = str, str(default)
    flag = f"--{each.name.replace('_', '-')}"
    if kind is bool and default:
        flag = f"{flag}/--no-{flag[2:]}"
    help: str = each.metadata["help"]
    required = default is MISSING
    annotation: Any = Annotated[
        kind,
        typer.Argument(metavar=each.name.upper(), help=help) if required else typer.Option(flag, help=help),
    ]
    default = inspect.Parameter.empty if required else default
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _number_or_word(kind: Any) -> bool:
    return set(get_args(kind)) == {float, str}


def _instance(cls: type[Any], given: dict[str, Any]) -> Any:
    """An instance of what was given on the command line, which is taken out of it."""
    hints, own = get_type_hints(cls), {}
    for each in fields(cls):
        if each.name not in given:
            continue
        value = given.pop(each.name)
        if _number_or_word(hints[each.name]):
            with contextlib.suppress(ValueError):  # a word is checked where it is used
                value = float(value)
        own[each.name] = value
    return cls(**own)
