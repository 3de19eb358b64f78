"""Reads flags, types, choices, defaults and help of a trainer's argument parser, without its environment.

Importing sd-scripts' parser needs torch, many seconds and its complete environment; the page has none of these. But the
functions that fill the parser need almost nothing of what their files import. So each name of a source file is made when
it is first used: a function is compiled, a constant computed, a module of the checkout read the same way. Whatever is not
in the checkout or in the standard library, and every class, is a stand-in that takes part in anything and does nothing.
The script's `setup_parser`, or where it has none (musubi-tuner) its `main`, then runs up to `parse_args`. The result is
kept by the commit of the checkout.
"""

import argparse
import ast
import builtins
import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from presets.tables import PresetError

TYPES = {"int": "int", "float": "float", "int_or_float": "float", "int_or_ratio": "float"}


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
        switch = action.nargs == 0
        choices = [choice for choice in action.choices or () if choice is not None]
        found[name] = {
            "type": "bool" if switch else TYPES.get(getattr(action.type, "__name__", ""), "str"),
            "nargs": None if switch else action.nargs,
            "choices": choices or None,
            "default": None if action.default is ANYTHING else action.default,
            "required": action.required,
            "help": "" if action.help in (None, argparse.SUPPRESS, ANYTHING) else action.help,
        }
        if action.default is ANYTHING:
            found[name]["default_is_computed"] = True
    return found


def flags_of(checkout: Path, script: str = "flux_train_network.py") -> dict[str, dict]:
    """The flags of a script (its path in a checkout), as `of_parser`; read once a process for a commit of the checkout.

    Raises:
        PresetError: the script does not exist, fills no parser, or fails.
    """
    path, musubi = checkout / script, "musubi_tuner" in script
    name, root, entry = ("musubi", checkout / "src", "main") if musubi else ("sd-scripts", checkout, "setup_parser")
    if not path.is_file():
        variable = f"{name.replace('-', '_').upper()}_DIR"
        raise PresetError(f"{path} does not exist; run ./start.sh {name}, or set {variable}")
    key = (path, commit(checkout), path.stat().st_mtime_ns)
    if key[1] is None or key not in _known:
        names = _Checkout(root).names(path)
        if entry not in names.nodes:
            raise PresetError(f"{path}: no function {entry}; this version is not supported, run ./start.sh {name}")
        try:
            parser = names[entry]()
        except _Parsing as parsing:
            parser = parsing.args[0]
        except PresetError:
            raise
        except (Exception, SystemExit) as error:  # it is the trainer's own code
            text = f"{path}: {entry} failed ({error}); run ./start.sh {name} for the tested version"
            raise PresetError(text) from error
        _known[key] = of_parser(parser)
    return copy.deepcopy(_known[key])


_known: dict[tuple[Path, str | None, int], dict[str, dict]] = {}


def commit(checkout: Path) -> str | None:
    """The current commit of a git checkout, read from its files; None when it cannot be found there."""
    try:
        head = (checkout / ".git" / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head or None
        name = head.removeprefix("ref: ")
        loose = checkout / ".git" / name
        if loose.is_file():
            return loose.read_text(encoding="utf-8").strip() or None
        for line in (checkout / ".git" / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0]
    except OSError:
        return None
    return None


class _Parsing(BaseException):
    """The parser has all its flags."""


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *_: object, **__: object) -> NoReturn:
        raise _Parsing(self)


class _Anything:
    """Stands for what the checkout takes from elsewhere."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> "_Anything":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __deepcopy__(self, _: object) -> "_Anything":
        return self

    __getitem__ = __add__ = __radd__ = __or__ = __ror__ = __call__


ANYTHING = _Anything()
ARGPARSE = SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})


class _Checkout:
    """The source files of a checkout."""

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[Path, _Names] = {}

    def names(self, path: Path) -> "_Names":
        """The names of a file."""
        if path not in self.files:
            self.files[path] = _Names(self, path)
        return self.files[path]

    def module(self, dotted: str) -> Any:
        """What `import DOTTED` gives: a module of the checkout or of the standard library, else a stand-in."""
        path = self.root.joinpath(*dotted.split("."))
        file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
        if file or path.is_dir():
            return _Module(self, dotted, self.names(file) if file else {})
        if dotted == "argparse":
            return ARGPARSE
        return importlib.import_module(dotted) if dotted.split(".")[0] in sys.stdlib_module_names else ANYTHING

    def import_(
        self, dotted: str, _globals: object = None, _locals: object = None, names: Any = (), level: int = 0
    ) -> Any:
        """As `__import__`, for an import inside a function."""
        return self.module(dotted if names else dotted.split(".")[0]) if not level else ANYTHING


class _Module:
    """A module of the checkout."""

    def __init__(self, checkout: _Checkout, dotted: str, names: Any):
        self._checkout, self._dotted, self._names = checkout, dotted, names

    def __getattr__(self, name: str) -> Any:
        known = isinstance(self._names, _Names) and name in self._names.nodes
        return self._names[name] if known else self._checkout.module(f"{self._dotted}.{name}")


class _Names(dict[str, Any]):
    """The names of a source file; the globals of its functions."""

    def __init__(self, checkout: _Checkout, path: Path):
        super().__init__(__builtins__={**vars(builtins), "__import__": checkout.import_}, __name__=path.stem)
        self.checkout, self.path = checkout, path
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (OSError, SyntaxError, ValueError) as error:
            raise PresetError(
                f"{path} cannot be parsed as Python ({error}); restore the file with `git checkout`"
            ) from error
        self.nodes: dict[str, ast.AST | tuple[str, str]] = {}  # of an import: the module, and the name in it
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self.nodes |= {one.asname or one.name: (node.module or "", one.name) for one in node.names}
            elif isinstance(node, ast.Import):
                tops = [(one.asname, one.name if one.asname else one.name.split(".")[0]) for one in node.names]
                self.nodes |= {name or top: (top, "") for name, top in tops}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.nodes[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.nodes |= {one.id: node.value for one in targets if isinstance(one, ast.Name)}

    def __missing__(self, name: str) -> Any:
        if name not in self.nodes and hasattr(builtins, name):
            raise KeyError(name)
        self[name] = ANYTHING  # for a name that is computed from itself
        self[name] = self._made(self.nodes.get(name))
        return self[name]

    def _made(self, node: ast.AST | tuple[str, str] | None) -> Any:
        if isinstance(node, tuple):
            module = self.checkout.module(node[0])
            return getattr(module, node[1], ANYTHING) if node[1] else module
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            future = ast.parse("from __future__ import annotations").body  # no annotation is computed
            exec(compile(ast.Module([*future, node], []), str(self.path), "exec"), self)
            return self[node.name]
        if isinstance(node, ast.expr):
            return eval(compile(ast.Expression(node), str(self.path), "eval"), self)
        return ANYTHING
