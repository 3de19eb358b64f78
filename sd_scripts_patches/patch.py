"""What a patch is: where it binds, by name, and what it does to a module once that name is there.

Each patch is one file of this folder that defines `PATCH`. Binding is declared as data (`Target`) so that the same
declaration can be judged without importing torch (fits.py) and enforced when the module is really imported
(hooks.py). A patch never names a line number.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType


class DoesNotFit(Exception):
    """The code a patch was written for is not there; the message says what was looked for and what was found."""


@dataclass(frozen=True)
class Target:
    """One name that a patch binds to.

    module: dotted name, of the checkout (`library.train_util`, `flux_train_network`) or installed (`torch.utils.data.dataloader`).
    name: qualified name in it (`Offloader._wait_blocks_move`); "" means the module as a whole.
    params: names of the leading positional parameters, `self` included; None where the name is no function. Further
        parameters may follow: wrappers pass them through.
    optional: absent means *not needed* (a model family this checkout does not have), present must still match.
    check: a further look at the module's syntax tree; returns why it does not fit, or None.
    """

    module: str
    name: str = ""
    params: tuple[str, ...] | None = None
    optional: bool = False
    check: Callable[[ast.Module], str | None] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Patch:
    """name: as on the command line. why: one line, the hang it answers. relied_on: the presets' scripts need it, so
    `check` fails without it. apply: module name → function(module), called right after that module has run (for a
    script run as `__main__`: right before its `if __name__ == "__main__":`). rewrite: module name →
    function(tree) → tree, called on the syntax tree before the module is compiled; raises DoesNotFit.
    prepare: called once in the training process before the script is read (environment, process-wide settings);
    also called in each spawned worker, with `worker=True`."""

    name: str
    why: str
    targets: tuple[Target, ...] = ()
    relied_on: bool = True
    apply: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    rewrite: Mapping[str, Callable[[ast.Module], ast.Module]] = field(default_factory=dict)
    prepare: Callable[[bool], None] | None = None


def lookup(module: ModuleType, name: str) -> object:
    """The object `name` (dotted) in an imported module. Raises DoesNotFit naming the part that is missing."""
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise DoesNotFit(f"{module.__name__}:{name}: there is no {part!r}")
        found = getattr(found, part)
    return found


def wrap(module: ModuleType, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace `module.name` by `make(original)`, keeping its docstring and signature. Works for `Class.method` too.

    Raises DoesNotFit where the name is missing. A class keeps its identity: only the attribute is replaced, in the
    class that defines it, so subclasses and isinstance tests see no difference.
    """
    *owners, last = name.split(".")
    owner = lookup(module, ".".join(owners)) if owners else module
    original = vars(owner).get(last)
    if original is None:
        raise DoesNotFit(f"{module.__name__}:{name}: not defined there")
    binding = type(original) if isinstance(original, (staticmethod, classmethod)) else None
    function = original.__func__ if binding else original
    wrapped = functools.wraps(function)(make(function))
    setattr(owner, last, binding(wrapped) if binding else wrapped)


def find_one(tree: ast.AST, match: Callable[[ast.AST], bool], what: str) -> ast.AST:
    """The one node of `tree` that matches; DoesNotFit when there is none or more than one. For rewrites."""
    found = [node for node in ast.walk(tree) if match(node)]
    if len(found) != 1:
        raise DoesNotFit(f"{what}: looked for exactly one, found {len(found)}")
    return found[0]


def find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The definition of `name` (`Class.method` or a function) in a module's tree. Raises DoesNotFit."""
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in definitions(body) if getattr(n, "name", None) == part), None)
        if node is None:
            raise DoesNotFit(f"there is no {part!r} of {name!r}")
        body = node.body
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise DoesNotFit(f"{name!r} is no function")
    return node


def definitions(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body with those of its top-level `if` and `try` branches: where names are defined."""
    flat: list[ast.stmt] = []
    for node in body:
        flat.append(node)
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for branch in ("body", "orelse", "finalbody"):
                flat += definitions(getattr(node, branch, []))
            for handler in getattr(node, "handlers", []):
                flat += definitions(handler.body)
    return flat
