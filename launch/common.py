"""What the commands of `python -m launch` share: the error of a user, the table of arguments, the last line of JSON."""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from runs.files import RunError


class LaunchError(RunError):
    """An error that a user can fix: what is wrong, where, and what to do."""


Option = tuple[str, Any, str]
RUN: Option = ("RUN", "", "name or folder of a run")


def add_arguments(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Add the arguments of a command: the rows of its module's OPTIONS, or what its `add_arguments` adds."""
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    else:
        add_options(parser, module.OPTIONS)


def add_options(parser: argparse.ArgumentParser, rows: Iterable[Option]) -> None:
    """Add arguments from a table.

    A row is (`RUN` or `--name METAVAR`, default, help). A number's default says its type. False: a switch. []: can be
    repeated. ...: required. int: a number, None where it is not given. A tuple: the choices, the default first.
    """
    for words, default, text in rows:
        names = [word for word in words.split() if word.startswith("-")]
        rest = " ".join(words.split()[len(names) :])
        metavar: dict[str, Any] = {"metavar": rest} if rest else {}
        text = text.replace("%", "%%")
        if not names:
            parser.add_argument(rest.lower(), metavar=rest, help=text)
        elif default is False:
            parser.add_argument(*names, action="store_true", help=text)
        elif default == []:
            parser.add_argument(*names, action="append", default=[], help=f"{text}; can be repeated", **metavar)
        elif default is ...:
            parser.add_argument(*names, required=True, help=text, **metavar)
        elif isinstance(default, tuple):
            parser.add_argument(*names, default=default[0], choices=default, help=text)
        else:
            value = None if default is int else default
            kind = int if default is int else type(value) if isinstance(value, int | float) else str
            parser.add_argument(*names, default=value, type=kind, help=text, **metavar)


def report(args: argparse.Namespace, text: str, value: Any) -> int:
    """Print `text`, and with `--json` also `value` as the last line; the exit code 0."""
    if text:
        print(text)
    if args.json:
        print(json.dumps(value), flush=True)
    return 0


def fill(template: str, *sections: str, **values: str) -> str:
    """A template of this folder with each @NAME@ replaced by its value, and the `sections` of its `#[NAME … #]`."""
    text = (Path(__file__).parent / template).read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^#\[(\w+)\n(.*?)^#\]\n", lambda match: match[2] if match[1] in sections else "", text)
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1].lower()], text)
