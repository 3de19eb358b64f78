"""Random changes to a copy of the checkout, as upstream makes them: renamed, moved, decorated, another parameter.

`check` must say what each did to the guard. A change that leaves a function unguarded and is not named would be a wait
without an end that nobody knows of.
"""

import ast
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

from sd_scripts_patches import compatibility, locate, registry
from sd_scripts_patches.patch import Incompatible, Patch, Target

CHANGES = ("rename", "move", "move and forget", "decorate", "new parameter")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    tiny.need()
    source, folder = tiny.checkout(), tmp_path_factory.mktemp("changed") / "sd-scripts"
    folder.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, folder)
    for package in ("library", "networks"):
        shutil.copytree(source / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def functions(checkout: Path) -> list[tuple[Patch, Target, locate.Place]]:
    """The targets of all patches that are functions or methods of the checkout, with their places."""
    found = []
    for patch in registry.patches():
        for target in patch.targets:
            if target.make is None or target.beside or not locate.belongs_to_checkout(target.module, checkout):
                continue
            try:
                place = locate.locate(target, checkout)
            except Incompatible:
                continue
            if isinstance(locate.node_of(place, checkout), ast.FunctionDef):
                found.append((patch, target, place))
    return found


def change(kind: str, place: locate.Place, checkout: Path) -> list[Path]:
    """Make one change to the definition at `place`; return the files that were written."""
    path = locate.find_source(place.module, checkout)
    text = path.read_text(encoding="utf-8-sig")
    node = locate.node_of(place, checkout)
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    indent = " " * node.col_offset
    if kind == "rename":
        path.write_text(re.sub(rf"\b{node.name}\b", f"{node.name}_v2", text), encoding="utf-8")
        return [path]
    if kind == "decorate":
        lines.insert(first, f"{indent}@traced\n")
        path.write_text("".join(lines), encoding="utf-8")
        return [path]
    if kind == "new parameter":
        at = next(i for i in range(node.lineno - 1, len(lines)) if "(" in lines[i])
        bound = node.args.args and node.args.args[0].arg in ("self", "cls")
        if bound:
            own = node.args.args[0].arg
            at = next(i for i in range(at, len(lines)) if re.search(rf"\b{own}\b", lines[i]))
            lines[at] = re.sub(rf"\b{own}\b,?", f"{own}, context,", lines[at], count=1)
        else:
            lines[at] = lines[at].replace("(", "(context, ", 1)
        path.write_text("".join(lines), encoding="utf-8")
        return [path]
    top = place.name.split(".")[0]  # a method moves with its class
    owner = locate.node_of(locate.Place(place.module, top, False), checkout)
    start = min([owner.lineno, *(d.lineno for d in owner.decorator_list)]) - 1
    body = "".join(lines[start : owner.end_lineno])
    imports = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    new = checkout / "library" / "elsewhere.py"
    new.write_text("\n".join(ast.unparse(n) for n in imports) + "\n\n" + body, encoding="utf-8")
    reference = f"from library.elsewhere import {top}\n" if kind == "move" else "import library.elsewhere\n"
    lines[start : owner.end_lineno] = [reference]
    path.write_text("".join(lines), encoding="utf-8")
    return [path, new]


def restore(written: list[Path], checkout: Path) -> None:
    for path in written:
        original = tiny.checkout() / path.relative_to(checkout)
        if original.exists():
            shutil.copy(original, path)
        else:
            path.unlink()


def expected(kind: str, target: Target) -> tuple[str, ...]:
    if kind == "rename":
        return ("missing", "changed")
    if kind in ("move", "move and forget"):
        return ("moved",)
    if kind == "decorate":
        return ("guarded", "moved")
    return ("changed",) if target.params is not None and target.params else ("guarded", "moved", "changed")


def make_changes(copy: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    targets = functions(copy)
    assert len(targets) > 30
    wrong, done = [], dict.fromkeys(CHANGES, 0)
    for number in range(count):
        patch, target, place = rng.choice(targets)
        kind = CHANGES[number % len(CHANGES)]
        if kind == "move and forget" and place.module in ("train_network", "flux_train_network"):
            kind = "move"  # a script keeps its trainer class
        written = change(kind, place, copy)
        try:
            finding = compatibility.check_target(target, copy, patch.why)
            ambiguous = kind == "move and forget" and "several modules define it" in finding.reason
            if finding.verdict not in expected(kind, target) and not ambiguous:
                wrong.append(f"{kind}: {target}: {finding}")
            if finding.verdict in compatibility.OPEN and not (finding.reason and finding.open):
                wrong.append(f"{kind}: {target}: not named: {finding}")
            done[kind] += 1
        finally:
            restore(written, copy)
    assert not wrong, "\n".join(wrong)
    print(done)
    assert all(
        finding.verdict in ("guarded", "moved")
        for finding in map(lambda p: compatibility.check_patch(p, copy), registry.patches())
    )


def test_two_hundred_random_changes_are_named(copy):
    make_changes(copy, 200, seed=2)


def test_a_function_that_moved_is_guarded_when_the_trainer_imports_it(copy, tmp_path):
    """The real modules, imported with the patches: every caller's reference is the guarded function."""
    names = ("load_image", "save_and_remove_state_stepwise", "init_trackers")
    chosen = [(t, p) for _, t, p in functions(copy) if t.name in names]
    assert len({t.name for t, _ in chosen}) == len(names)
    code = (
        "import sys; from pathlib import Path\n"
        "from sd_scripts_patches import hooks, registry\n"
        f"sys.path.insert(0, {str(copy)!r})\n"
        f"hooks.install(registry.patches(), Path({str(copy)!r}))\n"
        "import train_network, importlib\n"
        "assert hooks.not_guarded() == [], hooks.not_guarded()\n"
        "for module, name in {checks!r}:\n"
        "    found = importlib.import_module(module)\n"
        "    for part in name.split('.'):\n        found = getattr(found, part)\n"
        "    assert hasattr(found, '__wrapped__'), (module, name)\n"
        "print('guarded')\n"
    )
    for target, place in chosen[:: max(1, len(chosen) // 4)]:
        written = change("move", place, copy)
        try:
            checks = [(place.module, place.name), ("library.elsewhere", place.name)]
            done = subprocess.run(
                [str(tiny.python()), "-c", code.replace("{checks!r}", repr(checks))], cwd=copy, check=False,
                env=tiny.environment(tiny.site()), capture_output=True, text=True, timeout=400,
            )  # fmt: skip
        finally:
            restore(written, copy)
        assert done.stdout.strip().endswith("guarded"), (target, done.stdout[-500:], done.stderr[-3000:])
