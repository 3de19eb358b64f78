"""What the commands of `python -m launch` share: the error of a user, the argument RUN, the last line of JSON."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from runs.paths import run_folder


class LaunchError(Exception):
    """An error that a user can fix: what is wrong, where, and what to do."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN."""
    parser.add_argument("run", metavar="RUN", help="name, slug or folder of a run")


def add_options(parser: argparse.ArgumentParser, *rows: tuple[str, Any, str]) -> None:
    """Add options, each as (`--name METAVAR`, default, help): a number's default says its type.

    False: a switch. []: can be repeated. ...: required. int: a number, None where it is not given.
    """
    for words, default, text in rows:
        name, _, metavar = words.partition(" ")
        text = text.replace("%", "%%")
        if default is False:
            parser.add_argument(name, action="store_true", help=text)
        elif default == []:
            parser.add_argument(name, action="append", default=[], metavar=metavar, help=f"{text}; can be repeated")
        elif default in (..., int):
            kind = int if default is int else str
            parser.add_argument(name, required=default is ..., type=kind, metavar=metavar, help=text)
        else:
            number = isinstance(default, int | float)
            parser.add_argument(
                name, default=default, type=type(default) if number else str, metavar=metavar, help=text
            )


def find(args: argparse.Namespace) -> Path:
    """The folder of the run that RUN names. Raises RunError."""
    return run_folder(args.run)


def report(args: argparse.Namespace, text: str, value: Any) -> int:
    """Print `text`, and with `--json` also `value` as the last line; the exit code 0."""
    if text:
        print(text)
    if args.json:
        print(json.dumps(value, ensure_ascii=False), flush=True)
    return 0


def fill(template: str, *sections: str, **values: str) -> str:
    """The text of a template of this folder: each @NAME@ replaced by its value, and of `#[SECTION … #]` those that are named."""
    text = (Path(__file__).parent / template).read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^#\[(\w+)\n(.*?)^#\]\n", lambda match: match[2] if match[1] in sections else "", text)
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1].lower()], text)


def plain_files(folder: Path) -> list[Path]:
    """The files below a folder, without hidden ones; links to folders are not followed."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        found += [Path(where, name) for name in sorted(names) if name[0] != "."]
    return found
