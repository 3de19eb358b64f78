"""The import hooks: `apply` right after a module has run, `rewrite` on its syntax tree before it is compiled.

A finder at the front of `sys.meta_path` asks the finders behind it where a module is and wraps the loader it gets,
so it composes with whatever else hooks imports. A rewrite goes in one level lower, where a source file is turned
into code (`SourceFileLoader.get_code`), for the same reason: whichever loader stands in between, the module runs
from the rewritten tree. Both fail closed: a module that was to be rewritten and was not, or whose name is missing,
ends the process with the patch's name before training begins.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType

from sd_scripts_patches.patch import DoesNotFit, Patch

_applies: dict[str, list[tuple[str, Callable[[ModuleType], None]]]] = {}
_rewrites: dict[str, list[tuple[str, Callable[[ast.Module], ast.Module]]]] = {}
_rewritten: set[str] = set()
_plain_get_code = importlib.machinery.SourceFileLoader.get_code


class _Loader(importlib.abc.Loader):
    """Runs a module with the loader it would have had, then the patches of that module."""

    def __init__(self, inner: importlib.abc.Loader, name: str) -> None:
        self.inner, self.name = inner, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        patched(module, self.name)

    def __getattr__(self, attribute: str) -> object:
        return getattr(self.inner, attribute)  # get_source, get_data, is_package…: inspect and pickle ask for them


class _Finder(importlib.abc.MetaPathFinder):
    """Answers only for modules that a patch names."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _applies and name not in _rewrites:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None


def install(patches: Iterable[Patch]) -> None:
    """Register the patches' functions and put the finder in front. Modules that are imported already are patched now.

    Raises DoesNotFit: for a module imported before its rewrite could take place, or one without the name.
    """
    for patch in patches:
        for module, function in patch.apply.items():
            _applies.setdefault(module, []).append((patch.name, function))
        for module, function in patch.rewrite.items():
            _rewrites.setdefault(module, []).append((patch.name, function))
    importlib.machinery.SourceFileLoader.get_code = _get_code
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in [*_applies, *_rewrites]:
        if name in sys.modules:
            patched(sys.modules[name], name)


def patched(module: ModuleType, name: str) -> None:
    """Apply the patches of `name` to a module that has just run, once. Raises DoesNotFit with the patch's name."""
    if name in _rewrites and name not in _rewritten:
        raise DoesNotFit(f"{name} was loaded without its rewrite ({', '.join(p for p, _ in _rewrites[name])})")
    if module.__dict__.get("__hangproof__"):
        return
    module.__hangproof__ = tuple(patch for patch, _ in _applies.get(name, ()))
    for patch, function in _applies.get(name, ()):
        try:
            function(module)
        except DoesNotFit as error:
            raise DoesNotFit(f"patch {patch}: {error}") from error


def rewrite(tree: ast.Module, name: str) -> ast.Module:
    """The syntax tree of module `name` with its rewrites, ready to compile; the same tree where it has none."""
    for patch, function in _rewrites.get(name, ()):
        try:
            tree = function(tree)
        except DoesNotFit as error:
            raise DoesNotFit(f"patch {patch}: {name}: {error}") from error
    _rewritten.add(name)
    return ast.fix_missing_locations(tree)


def applies_to(name: str) -> bool:
    """True where some patch has a function for module `name`."""
    return name in _applies


def _get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
    if fullname not in _rewrites:
        return _plain_get_code(loader, fullname)
    path = loader.get_filename(fullname)
    source = loader.get_data(path)
    return compile(rewrite(ast.parse(source, filename=path), fullname), path, "exec", dont_inherit=True)
