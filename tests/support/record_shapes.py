"""`python -m tests.support.record_shapes CHECKOUT…`: records what patches follow (data/upstream_shapes.json).

An outline, not code: for each pinned version the modules of the patches' targets, with the definitions of these targets
alone, in functions without a body; and of a function that a patch rewrites the statements that the patch looks for, in
their order and nesting. What is followed is read from the patches (registry.py); the statements are those that
a rewrite finds when it is tried.

`write_checkout` makes a checkout of the outlines: the patches' own check runs on it where no real one is.
"""

import ast
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sd_scripts_patches import ast_utils, compatibility, locate, patch as patching, registry, trainers, versions

FILE = Path(__file__).with_name("data") / "upstream_shapes.json"
NAMES = {"48d368fa557731ad0488c07304dfeba8c07910eb": "v0.10.1"}
"""Versions by commit: those that the table of trainers pins have theirs there."""


@dataclass
class Followed:
    """What is recorded of a module: places (line, column) of its definitions and statements, variables, re-exports."""

    places: set[tuple[int, int]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    exports: set[str] = field(default_factory=set)


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", -1)


def record(checkout: Path) -> dict[str, Any]:
    """Return the outlines of one checkout. Raises SystemExit for a folder that is none."""
    found = compatibility.find_checkout(checkout)
    if found is None:
        raise SystemExit(f"{checkout}: not a checkout of sd-scripts or musubi-tuner")
    modules: dict[str, Followed] = {}

    def add(target: patching.Target) -> locate.Place:
        place = locate.locate(target, found.source)
        followed = modules.setdefault(place.module, Followed())
        followed.places.add(_place(locate.node_of(place, found.source)))
        return place

    for target in (target for patch in registry.patches(found.trainer) for target in patch.targets):
        if not locate.belongs_to_checkout(target.module, found.source):
            continue
        if locate.find_source(target.module, found.source):
            modules.setdefault(target.module, Followed())  # one that is there although the target has moved
        if not target.name:
            continue
        with contextlib.suppress(patching.Incompatible):
            place = add(target)
            head = (target.beside or target.name).split(".")[0]
            new = locate._follow(target.module, head, found.source) if place.module != target.module else None
            if new is not None:  # the module of old imports the name from the new one
                modules[target.module].exports.add(f"from {new[0]} import {head}")
            if target.beside:  # the function by which the module was found
                add(patching.Target(target.module, target.beside))
    for target, rewrite in (one for patch in registry.patches(found.trainer) for one in patch.rewrites):
        place = locate.locate(target, found.source)
        try_out(rewrite, _tree(place.module, found), modules[place.module])
    outlines = {name: outline(_tree(name, found), followed) for name, followed in sorted(modules.items())}
    commit = versions.commit(checkout)
    pinned = {trainer.commit: trainer.version for trainer in trainers.TRAINERS.values()}
    about = {"trainer": found.trainer, "commit": commit, "version": {**NAMES, **pinned}.get(commit, commit[:8])}
    return {**about, "modules": outlines}


def _tree(module: str, found: compatibility.Checkout) -> ast.Module:
    source = locate.find_source(module, found.source)
    assert source is not None
    return locate.parse_uncached(source)


def try_out(rewrite: Callable[[ast.Module], ast.Module], tree: ast.Module, followed: Followed) -> None:
    """Note the places of the statements that a rewrite finds, and the variables that it relies on."""
    find_one = patching.find_one

    def noticed(*args: Any) -> Any:
        node = find_one(*args)
        followed.places.add(_place(node))
        return node

    def required(function: ast.FunctionDef, wanted: Any) -> None:
        followed.names.update(wanted)

    with contextlib.ExitStack() as stack:
        for module in [module for module in [*sys.modules.values()] if getattr(module, "find_one", None) is find_one]:
            stack.enter_context(mock.patch.object(module, "find_one", noticed))
        stack.enter_context(mock.patch.object(ast_utils, "require_variables", required))
        rewrite(tree)


def outline(tree: ast.Module, followed: Followed) -> list[str]:
    """Return the lines of a module with what is followed and what contains it; no conditions, types, defaults."""
    tree.body = [*ast.parse("\n".join(sorted(followed.exports))).body, *_outline(tree.body, followed)]
    return ast.unparse(tree).splitlines()


def _bound(node: ast.AST) -> set[str]:
    """The variables that are bound in a statement."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(getattr(n, "ctx", None), ast.Store)}


def _outline(body: list[ast.stmt], followed: Followed) -> Iterator[ast.stmt]:
    for node in body:
        found = _place(node) in followed.places
        inside = any(_place(n) in followed.places for n in ast.walk(node) if n is not node)
        if not found and not inside:
            continue
        bound = _bound(node)
        branches = [getattr(node, branch, []) for branch in ("body", "orelse", "finalbody")]
        below = [one for branch in branches for one in _outline(branch, followed)] or ast.parse("pass").body
        if isinstance(node, ast.FunctionDef):
            left = (bound - set().union(*map(_bound, below))) & followed.names if inside else ()
            variables = [f"{name} = None" for name in sorted(left)]
            node.body, node.decorator_list, node.returns = [*ast.parse("\n".join(variables)).body, *below], [], None
            for parameter in ast.walk(node.args):
                if isinstance(parameter, ast.arg):
                    parameter.annotation = None
            none = ast.Constant(None)
            node.args.defaults = [none for _ in node.args.defaults]
            node.args.kw_defaults = [value and none for value in node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            node.body, node.bases, node.keywords, node.decorator_list = below, [], [], []
        elif isinstance(node, (ast.For, ast.If)) and found:
            node.body, node.orelse = below, []
        elif not found and hasattr(node, "body"):
            node = ast.If(ast.Name("_"), below, [])
        yield node


def write_checkout(facts: dict[str, Any], folder: Path) -> Path:
    """Write the recorded modules; return their folder."""
    for module, lines in facts["modules"].items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in compatibility.MARKERS[facts["trainer"]]:
        if not name.endswith(".py"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def load() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def main(folders: list[str]) -> None:
    """Record the checkouts in place of what is recorded of the same commits."""
    known = {one["commit"]: one for one in load()} if FILE.is_file() else {}
    for folder in folders:
        facts = record(Path(folder).resolve())
        known[facts["commit"]] = facts
        print(f"{facts['trainer']} {facts['version']}: {len(facts['modules'])} modules")
    FILE.parent.mkdir(exist_ok=True)
    ordered = sorted(known.values(), key=lambda one: (one["trainer"], one["version"]))
    FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
