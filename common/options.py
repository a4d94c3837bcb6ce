"""Options of a process: one dataclass, read from the command line and the environment.

Each field made by `option` becomes `--field-name`, with the default taken from the environment
variable ``OCTAVO_FIELD_NAME`` where it is set, so that compose files need no wrapper script.
"""

import argparse
import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Options that several processes have.
CURVE_KEYS_HELP = (
    "folder of CURVE keys, made by `octavo keygen`; with it only processes that have keys of the same "
    "making are spoken to"
)
INSECURE_HELP = "allow other machines in without keys"

_BYTES = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class OptionError(ValueError):
    """A value that an option cannot have. The text names the option and says what it takes."""


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is a command-line option; bounds are inclusive.

    The help does not show the default of a `secret` one, which the environment may have given.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "parse": parse,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse_bytes(text: str) -> int:
    """``"4GiB"``, ``"512M"`` or ``"1000000"`` in bytes; k, M, G and T count in 1024s."""
    match = _BYTES.match(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a number of bytes such as 4GiB or 512M")
    return int(float(match[1]) * 1024 ** _POWER[match[2].lower()])


def environment_name(field: str) -> str:
    """The environment variable that a field's option reads."""
    return "OCTAVO_" + field.upper()


def flag(field: str) -> str:
    """The command-line spelling of a field's option."""
    return "--" + field.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Adds an option for each field of `cls` that the parser does not have yet."""
    known = {action.dest for action in parser._actions}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in known or "help" not in field.metadata:
            continue
        _add_option(parser, field, hints[field.name])


def read_options(cls: type[T], values: argparse.Namespace) -> T:
    """The options of `cls` among the parsed values. Raises OptionError."""
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: getattr(values, name) for name in names if hasattr(values, name)})


def to_arguments(options: Any) -> list[str]:
    """The command line that gives another process these options."""
    arguments = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is True:
            arguments.append(flag(field.name))
        elif value is False:
            arguments.append("--no-" + field.name.replace("_", "-"))
        elif value is not None:
            arguments += [flag(field.name), str(value)]
    return arguments


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    kind = _plain_type(hint)
    default = _environment_default(field, kind)
    shown = "from the environment" if field.metadata["secret"] else _shown(default)
    text = f"{field.metadata['help']} (default: {shown})".replace("%", "%%")
    if kind is bool:
        parser.add_argument(
            flag(field.name), default=default, action=argparse.BooleanOptionalAction, help=text
        )
        return
    parser.add_argument(
        flag(field.name),
        default=default,
        type=_reader(field, kind),
        choices=field.metadata["choices"],
        metavar=None if field.metadata["choices"] else kind.__name__.upper(),
        help=text,
    )


def _plain_type(hint: Any) -> Any:
    """`int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def _reader(field: dataclasses.Field[Any], kind: Any) -> Callable[[str], Any]:
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]

    def read(text: str) -> Any:
        try:
            value = (field.metadata["parse"] or kind)(text)
        except ValueError as error:
            reason = str(error) if field.metadata["parse"] else f"{text!r} is not {kind.__name__}"
            raise argparse.ArgumentTypeError(reason) from error
        if minimum is not None and not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is below the minimum of {minimum}")
        if maximum is not None and not value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is above the maximum of {maximum}")
        return value

    return read


def _environment_default(field: dataclasses.Field[Any], kind: Any) -> Any:
    text = os.environ.get(environment_name(field.name))
    if text is None or text == "":
        return field.default
    try:
        return _read_bool(text) if kind is bool else _reader(field, kind)(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise OptionError(f"{environment_name(field.name)}: {error}") from error


def _read_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not true or false")


def _shown(default: Any) -> str:
    return "chosen at start" if default is None else str(default)
