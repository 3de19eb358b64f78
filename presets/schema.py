"""Reads flags, types, choices, defaults and help of a trainer's argument parser, without its environment.

The trainer's own code fills its parser, in a process of its own (`python -m presets.schema`). That needs almost nothing
of what the code imports, such as torch, which takes seconds: whatever is neither in the checkout nor in the standard
library is a stand-in that takes part in anything and does nothing. The script's `setup_parser`, or where it has none
(musubi-tuner) its `main`, runs up to `parse_args`. The result is kept by the commit of the checkout.
"""

import argparse
import copy
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from presets.tables import ROOT, START, PresetError

TYPES = {"int": "int", "float": "float", **dict.fromkeys(("int_or_float", "_int_or_float", "int_or_ratio"), "float")}
DUMP_S = 60.0
_known: dict[tuple[Path, str, int], dict[str, dict]] = {}


def of_parser(parser: argparse.ArgumentParser) -> dict[str, dict]:
    """The flags of a parser by name (without dashes), in its order.

    Each: {type: bool|int|float|str, nargs, choices, default, required, help}, and default_is_computed where the default
    comes from a stand-in.
    """
    found = {}
    for action in parser._actions:
        name = next((option[2:] for option in action.option_strings if option.startswith("--")), "help")
        if name == "help":
            continue
        switch, computed = action.nargs == 0, action.default is ANYTHING
        found[name] = {
            "type": "bool" if switch else TYPES.get(getattr(action.type, "__name__", ""), "str"),
            "nargs": None if switch else action.nargs,
            "choices": [choice for choice in action.choices or () if choice is not None] or None,
            "default": None if computed else action.default,
            "required": action.required,
            "help": "" if action.help in (None, argparse.SUPPRESS, ANYTHING) else action.help,
        } | ({"default_is_computed": True} if computed else {})
    return found


def flags_of(checkout: Path, script: str = "flux_train_network.py", commit: str = "") -> dict[str, dict]:
    """The flags of a script (its path in a checkout), as `of_parser`; read once a process for a commit that is given.

    Raises:
        PresetError: the script does not exist, fills no parser, or fails.
    """
    path, musubi = checkout / script, "musubi_tuner" in script
    name, root, entry = ("musubi", checkout / "src", "main") if musubi else ("sd-scripts", checkout, "setup_parser")
    if not path.is_file():
        variable = f"{name.replace('-', '_').upper()}_DIR"
        raise PresetError(f"{path} does not exist; run {START} {name}, or set {variable}")
    key = (path, commit, path.stat().st_mtime_ns)
    if not commit or key not in _known:
        words = [sys.executable, "-m", "presets.schema", str(root.absolute()), str(path.absolute()), entry]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=DUMP_S, check=False)
            answer = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            answer = f"{entry} failed ({error})"
        if isinstance(answer, str):
            raise PresetError(f"{path}: {answer}; run {START} {name} for the tested version")
        _known[key] = answer
    return copy.deepcopy(_known[key])


# In the process of its own --------------------------------------------------------------------------------------------


class _Anything:
    """Stands for what the checkout takes from elsewhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__version__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: object) -> tuple[()]:
        return ()  # as a base class it adds nothing

    __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __or__ = __ror__ = __call__
    __lt__ = __le__ = __gt__ = __ge__ = __deepcopy__ = __enter__ = __exit__ = __call__


ANYTHING = _Anything()


class _StandIns(MetaPathFinder, Loader):
    """Finds every module that is neither in the checkout nor in the standard library."""

    def __init__(self, root: Path):
        self.root = root

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        top = self.root / name.partition(".")[0]
        here = top.is_dir() or top.with_suffix(".py").is_file() or top.name in sys.stdlib_module_names
        return None if here else ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: getattr(ANYTHING, name)


class _Parsing(BaseException):
    """The parser has all its flags."""


def _give_away(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
    raise _Parsing(parser)


def dump(root: str, path: str, entry: str) -> dict[str, dict] | str:
    """The flags of a script, as `of_parser`, or what is wrong with it. It changes this process: see above."""
    sys.meta_path.insert(0, _StandIns(Path(root)))
    sys.path[:0] = [root, str(Path(path).parent)]
    setattr(argparse.ArgumentParser, "parse_args", _give_away)  # noqa: B010 - mypy: it is a method
    try:
        names = runpy.run_path(path)
        if entry not in names:
            return f"no function {entry}; this version is not supported"
        return of_parser(names[entry]())
    except _Parsing as parsing:
        return of_parser(parsing.args[0])
    except SyntaxError as error:
        return f"cannot be parsed as Python ({error}); restore the file with `git checkout`"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the trainer's own code
        return f"{entry} failed ({error})"


if __name__ == "__main__":
    print("\n" + json.dumps(dump(*sys.argv[1:]), default=str))
