"""Finds the module that defines a function, wherever upstream keeps it today. Reads source only: nothing is imported.

A patch names a function and the module in which it lived when the patch was written. From there the search follows
re-exports (`from X import name`, `from X import *`) to the definition. Where the module is gone, or no longer binds the
name, every module of the checkout is searched: exactly one top-level definition is the function at its new place. None,
or several, is an answer for the user and never a guess.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sd_scripts_patches.patch import Incompatible, Target, definitions

SOURCE_FOLDERS = ("library", "networks", "src", "musubi_tuner")
"""Where a checkout keeps its modules, beside the scripts in its own folder."""
MAX_HOPS = 20
_parsing = threading.Lock()  # ast.parse in two threads at once fails in Python 3.11 (CPython's issue 106905)


@dataclass(frozen=True)
class Place:
    """Where a target is defined: its module, its qualified name, and whether it moved since the patch was written."""

    module: str
    name: str
    moved: bool


def find_source(module: str, checkout: Path | None) -> Path | None:
    """Return the source file of a module without importing it or its parents; None when it is missing."""
    parts = module.split(".")
    if checkout is not None:
        for candidate in (checkout.joinpath(*parts).with_suffix(".py"), checkout.joinpath(*parts, "__init__.py")):
            if candidate.is_file():
                return candidate
        if (checkout / f"{parts[0]}.py").is_file() or (checkout / parts[0]).is_dir():
            return None  # the checkout shadows an installed package of the same name
    try:
        spec = importlib.machinery.PathFinder.find_spec(parts[0])
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    if len(parts) == 1:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or []:
        below = Path(folder).joinpath(*parts[1:])
        for candidate in (below.with_suffix(".py"), below / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def parse_uncached(path: Path) -> ast.Module:
    """Return the syntax tree of a file, for a caller that changes it. Raises Incompatible when it cannot be read."""
    try:
        with _parsing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the checkout's strings are not this check's concern
            return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise Incompatible(f"{path}: {error.msg} (line {error.lineno})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Incompatible(f"{path}: cannot be read ({error})") from error


@functools.lru_cache(maxsize=512)
def _parse(path: Path, stamp: tuple[int, int]) -> ast.Module:
    return parse_uncached(path)


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, cached until the file changes. Raises Incompatible."""
    try:
        stat = path.stat()
    except OSError as error:
        raise Incompatible(f"{path}: cannot be read ({error})") from error
    return _parse(path, (stat.st_mtime_ns, stat.st_size))


def belongs_to_checkout(module: str, checkout: Path | None) -> bool:
    """Return True when the module's top-level name is in the checkout, or is one that only a checkout can hold."""
    head = module.split(".")[0]
    if checkout is not None and ((checkout / f"{head}.py").is_file() or (checkout / head).is_dir()):
        return True
    return head in ("library", "networks", "musubi_tuner") or head.endswith("_network")


def modules_of(checkout: Path) -> Iterator[str]:
    """Yield the dotted names of the checkout's modules: its trainers and what lies in its source folders. Its other
    scripts are programs of their own, which no trainer imports."""
    for path in sorted(checkout.glob("*train*.py")):
        yield path.stem
    for folder in SOURCE_FOLDERS:
        for path in sorted((checkout / folder).rglob("*.py")):
            parts = path.relative_to(checkout).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def locate(target: Target, checkout: Path | None) -> Place:
    """Return where the target is defined. Raises Incompatible when it is missing, or defined in several places."""
    head, *rest = (target.beside or target.name).split(".")
    module, symbol = _home(target.module, head, checkout)
    if target.beside:
        _bound(parse(_source(module, checkout)), target.name)
        name = target.name
    elif rest:
        module, owner = _method_home(module, symbol, rest, checkout)
        name = ".".join([owner, *rest])
    else:
        name = symbol
    # An installed package keeps what it exports elsewhere than where it is imported from (numpy.load).
    moved = belongs_to_checkout(target.module, checkout) and (module, name) != (target.module, target.name)
    return Place(module, name, moved)


def tree_of(place: Place, checkout: Path | None) -> ast.Module:
    """Return the syntax tree of the place's module. Raises Incompatible."""
    return parse(_source(place.module, checkout))


def node_of(place: Place, checkout: Path | None) -> ast.AST:
    """Return the definition at `place`. Raises Incompatible."""
    node: ast.AST = tree_of(place, checkout)
    for part in place.name.split("."):
        node = _bound(node, part)
    return node


def _source(module: str, checkout: Path | None) -> Path:
    path = find_source(module, checkout)
    if path is None:
        raise Incompatible(f"{module}: module not found")
    return path


def _home(module: str, symbol: str, checkout: Path | None) -> tuple[str, str]:
    """Return (module, name) of the top-level definition of `symbol`."""
    found = _follow(module, symbol, checkout)
    if found is not None:
        return found
    if checkout is None or not belongs_to_checkout(module, checkout):
        raise Incompatible(f"{module}:{symbol}: missing")
    places = [name for name in modules_of(checkout) if _defines(name, symbol, checkout)]
    if not places:
        raise Incompatible(f"{symbol!r} is missing: no module of the checkout defines it (it was in {module})")
    if len(places) > 1:
        raise Incompatible(f"{symbol!r} is no longer in {module}, and several modules define it: {', '.join(places)}")
    return places[0], symbol


def _follow(module: str, symbol: str, checkout: Path | None, hops: int = 0) -> tuple[str, str] | None:
    """Follow re-exports from `module` to the definition of `symbol`; None when the module does not bind it."""
    path = find_source(module, checkout)
    if path is None or hops > MAX_HOPS:
        return None
    tree = parse(path)
    try:
        node = _bound(tree, symbol)
    except Incompatible:
        stars = [n for n in definitions(tree.body) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
        for star in stars:
            origin = _absolute(star, module, path)
            found = _follow(origin, symbol, checkout, hops + 1) if origin != module else None
            if found is not None:
                return found
        return None
    if not isinstance(node, ast.ImportFrom):
        return module, symbol
    origin = _absolute(node, module, path)
    name = next(alias.name for alias in node.names if (alias.asname or alias.name) == symbol)
    found = _follow(origin, name, checkout, hops + 1)
    if found is None and checkout is not None and belongs_to_checkout(origin, checkout):
        return None  # a re-export of what is no longer there
    return found or (module, symbol)


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    """Return the absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _defines(module: str, symbol: str, checkout: Path) -> bool:
    path = find_source(module, checkout)
    try:
        node = _bound(parse(path), symbol) if path is not None else None
    except Incompatible:
        return False
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def _method_home(module: str, owner: str, rest: list[str], checkout: Path | None) -> tuple[str, str]:
    """Return (module, class) that defines a method: the class itself, or the base class that it was moved to."""
    cls = _bound(parse(_source(module, checkout)), owner)
    try:
        node = cls
        for part in rest:
            node = _bound(node, part)
        return module, owner
    except Incompatible as error:
        for base in cls.bases if isinstance(cls, ast.ClassDef) else []:
            if not isinstance(base, ast.Name) or base.id == owner:
                continue
            found = _follow(module, base.id, checkout)
            if found is None:
                continue
            try:
                place = _method_home(*found, rest, checkout)
            except Incompatible:
                continue
            if not _is_abstract(node_of(Place(place[0], ".".join([place[1], *rest]), True), checkout)):
                return place
        raise Incompatible(f"{module}:{'.'.join([owner, *rest])}: {error}") from error


def _is_abstract(node: ast.AST) -> bool:
    """Return True for a method that only declares what subclasses do: guarding it guards nothing."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    for statement in node.body:
        text = ast.unparse(statement)
        constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (constant or text == "pass" or text.startswith("raise NotImplementedError")):
            return False
    return True


def _bound(node: ast.AST, name: str) -> ast.AST:
    """Return the last statement of a body that binds `name`. Raises Incompatible."""
    found = [n for n in definitions(getattr(node, "body", [])) if name in _names(n)]
    if not found:
        raise Incompatible(f"{name!r} is missing")
    return found[-1]


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name.split(".")[0]) for a in node.names}
    return set()
