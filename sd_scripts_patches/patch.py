"""What a patch is: the names it binds to, and what it does to a module once that module has been imported.

Each patch is one file of this folder that defines `PATCH`. Its bindings are data (`Target`), so the same declaration is
checked without importing torch (compatibility.py) and enforced when the module is imported (hooks.py). A patch never
refers to a line number.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)


class Incompatible(Exception):
    """The code that a patch binds to is missing or different; the message says what was expected and what was found."""


def always(arguments: Sequence[str]) -> bool:
    """Every command line needs the patch."""
    return True


def uses(*flags: str) -> Callable[[Sequence[str]], bool]:
    """Return a `relevant` function: the command line has one of `flags`, or reads flags from a file."""
    names = ("--config_file", *flags)

    def relevant(arguments: Sequence[str]) -> bool:
        return any(argument.split("=", 1)[0] in names for argument in arguments)

    return relevant


@dataclass(frozen=True)
class Target:
    """One name that a patch binds to, and what replaces it.

    module: where the name was defined when the patch was written: in the checkout (`library.train_util`,
        `flux_train_network`) or installed (`torch.utils.data.dataloader`). The definition is found from there, through
        re-exports, wherever it is today (locate.py).
    name: qualified name (`Offloader._wait_blocks_move`); "" means the module itself.
    params: names of the leading positional parameters, `self` included; None when the name is not a function. More
        parameters may follow: wrappers pass them through.
    optional: a missing module means "not needed" (a model family that this checkout lacks); a present one must match.
    check: an extra check of the module's syntax tree; returns the reason for a mismatch, or None.
    make: original → replacement, called right after the module has run. None: the patch only relies on the name.
    beside: `name` is a global (`np`, `tqdm`, `shutil`) of the module that defines `beside`.
    wait: the wait that stays without a limit when this target is missing, in a few words.
    """

    module: str
    name: str = ""
    params: tuple[str, ...] | None = None
    optional: bool = False
    check: Callable[[ast.Module], str | None] | None = None
    make: Callable[[Any], Any] | None = None
    beside: str = ""
    wait: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


def function(module: str, signature: str, make: Callable[[Any], Any] | None = None, **more: Any) -> Target:
    """Return the target of a function. signature: name and leading positional parameters (`Class.method(self, args)`)."""
    name, _, params = signature.removesuffix(")").partition("(")
    return Target(module, name, tuple(filter(None, params.split(", "))), make=make, **more)


@dataclass(frozen=True)
class Patch:
    """One patch.

    name: as on the command line. why: the hang or failure that it prevents, in one line.
    rewrites: (target, function): function(tree) → tree changes the module that defines the target before it is
        compiled. Raises Incompatible.
    relevant: whether a command line needs this patch; what a run does not use cannot hang it.
    prepare: called once in the training process before the script is read (environment, process-wide settings), and in
        each spawned worker with `worker=True`.
    """

    name: str
    why: str
    targets: tuple[Target, ...] = ()
    rewrites: tuple[tuple[Target, Callable[[ast.Module], ast.Module]], ...] = ()
    relevant: Callable[[Sequence[str]], bool] = always
    prepare: Callable[[bool], None] | None = None


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A `make` for a function whose first parameter is the original: its other ones are those of the call."""

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return make


def with_names(**names: Any) -> Callable[[Any], Any]:
    """A `make` for a module that is used under a name of another one: the same with other functions."""
    return lambda module: types.SimpleNamespace(**{**vars(module), **names})


def lookup(module: ModuleType, name: str) -> object:
    """Return the object `name` (dotted) of an imported module. Raises Incompatible with the part that is missing."""
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise Incompatible(f"{module.__name__}:{name}: {part!r} is missing")
        found = getattr(found, part)
    return found


def wrap(module: ModuleType, name: str, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Replace `module.name` by `make(original)`; return both. A function keeps its docstring and signature.

    Raises Incompatible when the name is missing. A class keeps its identity: only the attribute is replaced, in the
    class that defines it, so subclasses and isinstance checks are unaffected.
    """
    *owners, last = name.split(".")
    owner = lookup(module, ".".join(owners)) if owners else module
    original = vars(owner).get(last)
    if original is None:
        raise Incompatible(f"{module.__name__}:{name}: not defined there")
    binding = type(original) if isinstance(original, (staticmethod, classmethod)) else None
    inner = original.__func__ if binding else original
    replacement = make(inner)
    if isinstance(replacement, types.FunctionType) and callable(inner) and not isinstance(inner, type):
        replacement = functools.wraps(inner)(replacement)
    setattr(owner, last, binding(replacement) if binding else replacement)
    return inner, replacement


def find_one(tree: ast.AST, kind: type[Node], match: Callable[[Node], bool], what: str) -> Node:
    """Return the only node of `kind` that matches. Raises Incompatible when there is none or more than one."""
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and match(node)]
    if len(found) != 1:
        raise Incompatible(f"{what}: expected exactly one, found {len(found)}")
    return found[0]


def find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the definition of `name` (`Class.method` or a function) in a module's tree. Raises Incompatible."""
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in definitions(body) if getattr(n, "name", None) == part), None)
        if node is None:
            raise Incompatible(f"{part!r} of {name!r} is missing")
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        raise Incompatible(f"{name!r} is not a function")
    return node


def definitions(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body and of its top-level `if`, `try` and `with` branches: where names are defined."""
    flat: list[ast.stmt] = []
    for node in body:
        flat.append(node)
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for branch in ("body", "orelse", "finalbody"):
                flat += definitions(getattr(node, branch, []))
            for handler in getattr(node, "handlers", []):
                flat += definitions(handler.body)
    return flat
