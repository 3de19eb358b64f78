"""`python tests/support/record_shapes.py CHECKOUT…`: records what the patches follow in kohya's trainers (data/upstream_shapes.json).

Facts, not code: for each pinned version the modules, names and signatures of the patches' targets, where they stand
today, and of a function that a patch rewrites an outline: the statements that the patch looks for, in their order and
nesting. What is followed is read from the patches themselves (registry.py); the statements are those that a rewrite
finds when it is tried.

`write_checkout` makes a checkout of the facts, with empty functions: the patches' own check runs on it where no real one is.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sd_scripts_patches import ast_utils, compatibility, locate, registry, trainers, versions  # noqa: E402
from sd_scripts_patches import patch as patching  # noqa: E402
from sd_scripts_patches.patch import Incompatible, Target  # noqa: E402

FILE = Path(__file__).with_name("data") / "upstream_shapes.json"
NAMES = {"48d368fa557731ad0488c07304dfeba8c07910eb": "v0.10.1"}
"""Versions by commit: those that the table of trainers pins have theirs there."""


def record(checkout: Path) -> dict[str, Any]:
    """Return the facts of one checkout. Raises SystemExit for a folder that is none."""
    found = compatibility.find_checkout(checkout)
    if found is None:
        raise SystemExit(f"{checkout}: not a checkout of sd-scripts or musubi-tuner")
    modules: dict[str, dict[str, Any]] = {}

    def add(target: Target) -> locate.Place:
        place = locate.locate(target, found.source)
        modules.setdefault(place.module, {})[place.name] = _shape(locate.node_of(place, found.source))
        return place

    for target in (target for patch in registry.patches(found.trainer) for target in patch.targets):
        if not locate.belongs_to_checkout(target.module, found.source):
            continue
        if locate.find_source(target.module, found.source):
            modules.setdefault(target.module, {})  # one that is there although the target has moved
        if not target.name:
            continue
        with contextlib.suppress(Incompatible):
            place = add(target)
            head = (target.beside or target.name).split(".")[0]
            new = locate._follow(target.module, head, found.source) if place.module != target.module else None
            if new is not None:  # the module of old imports the name from the new one
                modules.setdefault(target.module, {})[head] = f"from {new[0]}"
            if target.beside:  # the function by which the module was found
                add(Target(target.module, target.beside))
    for name, outline in _outlines(found).items():
        modules[name]["outline"] = outline
    commit = versions.commit(checkout)
    pinned = {trainer.commit: trainer.version for trainer in trainers.TRAINERS.values()}
    about = {"trainer": found.trainer, "commit": commit, "version": {**NAMES, **pinned}.get(commit, commit[:8])}
    return {**about, "modules": dict(sorted(modules.items()))}


def _shape(node: ast.AST) -> str:
    """Return a function's signature without types and defaults, or what else binds the name."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return signature(node.args)
    return "class" if isinstance(node, ast.ClassDef) else "name"


def signature(given: ast.arguments) -> str:
    """Return the parameters as text; `=…` stands for a default."""
    bare, default = copy.deepcopy(given), ast.Name("…")
    bare.defaults = [default for _ in given.defaults]
    bare.kw_defaults = [value and default for value in given.kw_defaults]
    for parameter in ast.walk(bare):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    return f"({ast.unparse(bare)})"


def _outlines(found: compatibility.Checkout) -> dict[str, list[str]]:
    """Return, by module, the outline of what the rewrites look for in it."""
    looked_for: dict[Path, tuple[str, set[tuple[int, int]], set[str]]] = {}
    for target, rewrite in (one for patch in registry.patches(found.trainer) for one in patch.rewrites):
        module = locate.locate(target, found.source).module
        source = locate.find_source(module, found.source)
        assert source is not None
        _, places, names = looked_for.setdefault(source, (module, set(), set()))
        found_places, found_names = _tried(rewrite, locate.parse_uncached(source))
        places |= found_places
        names |= found_names
    return {
        module: list(_outline(locate.parse(source).body, places, sorted(names), 0))
        for source, (module, places, names) in looked_for.items()
    }


def _tried(rewrite: Callable[[ast.Module], ast.Module], tree: ast.Module) -> tuple[set[tuple[int, int]], set[str]]:
    """Return the places of the statements that a rewrite finds, and the variables that it relies on."""
    places: set[tuple[int, int]] = set()
    names: set[str] = set()
    find_one = patching.find_one

    def noticed(*args: Any) -> Any:
        node = find_one(*args)
        places.add((node.lineno, node.col_offset))
        return node

    def required(function: ast.FunctionDef, wanted: Any) -> None:
        names.update(wanted)

    with contextlib.ExitStack() as stack:
        for module in [module for module in [*sys.modules.values()] if getattr(module, "find_one", None) is find_one]:
            stack.enter_context(mock.patch.object(module, "find_one", noticed))
        stack.enter_context(mock.patch.object(ast_utils, "require_variables", required))
        rewrite(tree)
    return places, names


def _outline(body: list[ast.stmt], places: set[tuple[int, int]], names: list[str], depth: int) -> Iterator[str]:
    """Yield lines of Python: the statements at `places` and what contains them. Conditions and other headers are left out."""
    indent = " " * depth
    for node in body:
        below = [(getattr(n, "lineno", 0), getattr(n, "col_offset", -1)) for n in ast.walk(node) if n is not node]
        inside = places & set(below)
        found = (node.lineno, node.col_offset) in places
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and inside:
            if isinstance(node, ast.ClassDef):
                yield f"{indent}class {node.name}:"
            else:
                yield f"{indent}def {node.name}{signature(node.args)}:".replace("=…", "=None")
                own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                yield from (f"{indent} {name} = None" for name in names if name in own)
        elif isinstance(node, ast.For) and (found or inside):
            what = f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}" if found else "_ in _"
            yield from (f"{indent}for {what}:", f"{indent} pass")
        elif found:
            yield from (indent + line for line in ast.unparse(node).splitlines())
            continue
        elif not inside:
            continue
        elif isinstance(node, (ast.If, ast.While)):
            yield f"{indent}if _:"
            yield f"{indent} pass"
        elif isinstance(node, (ast.With, ast.Try)):
            yield f"{indent}with _:"
        for branch in ("body", "orelse", "finalbody"):
            yield from _outline(getattr(node, branch, []), places, names, depth + 1)


def write_checkout(facts: dict[str, Any], folder: Path) -> Path:
    """Write modules with the recorded names and signatures, and no code in them; return the folder of the modules."""
    for module, shapes in facts["modules"].items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        outline = shapes.get("outline", [])
        lines, classes = list(outline), {}
        for name, shape in shapes.items():
            owner, _, last = name.rpartition(".")
            if name != "outline":
                classes.setdefault(owner, []).append((last, shape))
        for owner, members in classes.items():
            indent = " " if owner else ""
            at = lines.index(f"class {owner}:") + 1 if f"class {owner}:" in lines else len(lines)
            new = [] if f"class {owner}:" in lines or not owner else [f"class {owner}:"]
            for last, shape in members:
                if shape.startswith("from "):
                    new.append(f"{shape} import {last}")
                elif shape == "name":
                    new.append(f"{indent}{last} = None")
                elif shape == "class" and f"class {last}:" not in lines and last not in classes:
                    new.append(f"{indent}class {last}: pass")
                elif shape[0] == "(" and not any(line.startswith(f"{indent}def {last}(") for line in outline):
                    new.append(f"{indent}def {last}{shape.replace('=…', '=None')}: pass")
            lines[at:at] = new
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in compatibility.MARKERS[facts["trainer"]]:
        if not name.endswith(".py"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def load() -> list[dict[str, Any]]:
    """Return the recorded facts of all pinned versions."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def main(folders: list[str]) -> None:
    """Record the checkouts in place of what is recorded of the same commits."""
    known = {one["commit"]: one for one in load()} if FILE.is_file() else {}
    for folder in folders:
        facts = record(Path(folder).resolve())
        known[facts["commit"]] = facts
        print(f"{facts['trainer']} {facts['version']}: {sum(map(len, facts['modules'].values()))} names")
    FILE.parent.mkdir(exist_ok=True)
    ordered = sorted(known.values(), key=lambda one: (one["trainer"], one["version"]))
    FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
