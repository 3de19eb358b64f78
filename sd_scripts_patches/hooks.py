"""Import hooks: targets are replaced right after their module has run; rewrites change its tree before it compiles.

A finder at the front of `sys.meta_path` asks the finders behind it for the module and wraps the loader that they
return, so it composes with other import hooks. A rewrite is installed one level lower, where a source file is compiled
(`SourceFileLoader.get_code`), for the same reason: the module runs from the rewritten tree whichever loader is in
between. A module that was not rewritten, or that lacks a name, stops the process with the name of the patch before
training starts.

Each target is replaced in the module that defines it (locate.py). A module that imported the original earlier (a
circular import, or an import before the hooks) holds a reference of its own, which is replaced too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from sd_scripts_patches import locate
from sd_scripts_patches.patch import Incompatible, Patch, Target, lookup, wrap

CHECKOUT_VARIABLE = "HANGPROOF_CHECKOUT"
"""Tells spawned workers where the checkout is."""


@dataclass(frozen=True)
class _Bound:
    """A target of a patch at the place where it is defined."""

    patch: str
    target: Target
    name: str


_bound: dict[str, list[_Bound]] = {}
_rewrites: dict[str, list[tuple[str, Callable[[ast.Module], ast.Module]]]] = {}
_rewritten: set[str] = set()
_places: dict[tuple[str, str], locate.Place] = {}
_original_get_code = importlib.machinery.SourceFileLoader.get_code


class _Loader(importlib.abc.Loader):
    """Runs a module with its original loader, then calls `then(module, name)`."""

    def __init__(self, inner: importlib.abc.Loader, name: str, then: Callable[[ModuleType, str], None]) -> None:
        self.inner, self.name, self.then = inner, name, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.then(module, self.name)

    def __getattr__(self, attribute: str) -> object:
        return getattr(self.inner, attribute)  # inspect and pickle use get_source, get_data, is_package…


class Finder(importlib.abc.MetaPathFinder):
    """Calls `then(module, name)` right after a module has run whose name it `handles`."""

    def __init__(self, handles: Callable[[str], bool], then: Callable[[ModuleType, str], None]) -> None:
        self.handles, self.then = handles, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the finders after this one, with a loader that calls `then`; None for other modules."""
        if not self.handles(name):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, name, self.then)
                return spec
        return None


def install(patches: Iterable[Patch], checkout: Path | None) -> None:
    """Find the targets of the patches and install the hooks. Modules that are already imported are patched now.

    A target that is missing is left out; the launcher has named it and decided that the run may start without it.
    Raises Incompatible for a module that was imported before it could be rewritten, or that lacks a name.
    """
    for patch in patches:
        for target in patch.targets:
            place = _place(target, checkout)
            if place is None or target.make is None:
                continue
            bound = _bound.setdefault(place.module, [])
            if not any(one.target.make is target.make and one.name == place.name for one in bound):
                bound.append(_Bound(patch.name, target, place.name))
        for target, function in patch.rewrites:
            place = _place(target, checkout)
            if place is not None:
                _rewrites.setdefault(place.module, []).append((patch.name, function))
    importlib.machinery.SourceFileLoader.get_code = _get_code  # type: ignore[method-assign,assignment]
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in list(dict.fromkeys([*_bound, *_rewrites])):
        if name in sys.modules:
            apply_to(sys.modules[name], name)


def _place(target: Target, checkout: Path | None) -> locate.Place | None:
    try:
        place = locate.locate(target, checkout)
    except Incompatible:
        return None
    _places[target.module, target.name] = place
    return place


def current(module: str, name: str) -> Any:
    """Return what stands at a target's place now, importing its module. `module` and `name` are those of the target."""
    place = _places.get((module, name), locate.Place(module, name, False))
    return lookup(importlib.import_module(place.module), place.name)


def apply_to(module: ModuleType, name: str) -> None:
    """Replace the targets in a module that has just run. Does nothing the second time.

    Raises Incompatible when the module lacks a name, or was imported before it could be rewritten.
    """
    if name in _rewrites and name not in _rewritten:
        raise Incompatible(
            f"{name} was loaded without its rewrite ({', '.join(patch for patch, _ in _rewrites[name])})"
        )
    if module.__dict__.get("__hangproof__"):
        return
    module.__dict__["__hangproof__"] = tuple(bound.patch for bound in _bound.get(name, ()))
    replaced: dict[int, tuple[object, object]] = {}
    for bound in _bound.get(name, ()):
        assert bound.target.make is not None
        try:
            original, replacement = wrap(module, bound.name, bound.target.make)
        except Incompatible as error:
            raise Incompatible(f"patch {bound.patch}: {error}") from error
        if not bound.target.beside and "." not in bound.name:
            replaced[id(original)] = (original, replacement)
    _replace_references(replaced, module)


_finder = Finder(lambda name: name in _bound or name in _rewrites, apply_to)


def _replace_references(replaced: dict[int, tuple[object, object]], home: ModuleType) -> None:
    """Replace the originals in the modules that imported them by name before their own module had finished."""
    for module in [*sys.modules.values()] if replaced else []:
        if module is home or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            pair = replaced.get(id(value))
            if pair is not None and pair[0] is value:
                vars(module)[key] = pair[1]


def rewrite(tree: ast.Module, name: str) -> ast.Module:
    """Return the syntax tree of module `name` with its rewrites, ready to compile; the same tree when it has none."""
    for patch, function in _rewrites.get(name, ()):
        try:
            tree = function(tree)
        except Incompatible as error:
            raise Incompatible(f"patch {patch}: {name}: {error}") from error
    _rewritten.add(name)
    return ast.fix_missing_locations(tree)


def module_name(script: Path) -> str:
    """Return the name that an import of the script has: dotted, from the checkout's folder of modules."""
    checkout = os.environ.get(CHECKOUT_VARIABLE)
    path = script.resolve()
    if checkout and path.is_relative_to(checkout):
        return ".".join(path.relative_to(checkout).with_suffix("").parts)
    return script.stem


def applies_to(name: str) -> bool:
    """Return True when a target is defined in module `name`."""
    return name in _bound


def _get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
    if fullname not in _rewrites:
        return _original_get_code(loader, fullname)
    path = loader.get_filename(fullname)
    source = loader.get_data(path)
    return compile(rewrite(ast.parse(source, filename=path), fullname), path, "exec", dont_inherit=True)
