"""A function that upstream moves to another module is followed by `check`, and guarded when a training imports it.

A function that is renamed, or takes another parameter: tests/unit/sd_scripts_patches/test_shapes.py.
"""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

from sd_scripts_patches import compatibility, locate, registry
from sd_scripts_patches.patch import Incompatible, Patch, Target


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


def move(place: locate.Place, checkout: Path) -> list[Path]:
    """Move the definition at `place` to another module, and import it from there; return the files that were written."""
    path = locate.find_source(place.module, checkout)
    text = path.read_text(encoding="utf-8-sig")
    lines = text.splitlines(keepends=True)
    top = place.name.split(".")[0]  # a method moves with its class
    owner = locate.node_of(locate.Place(place.module, top, False), checkout)
    start = min([owner.lineno, *(d.lineno for d in owner.decorator_list)]) - 1
    imports = [ast.unparse(n) for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    new = checkout / "library" / "elsewhere.py"
    new.write_text(
        "\n".join([*imports, "", *"".join(lines[start : owner.end_lineno]).splitlines(), ""]), encoding="utf-8"
    )
    lines[start : owner.end_lineno] = [f"from library.elsewhere import {top}\n"]
    path.write_text("".join(lines), encoding="utf-8")
    return [path, new]


def restore(written: list[Path], checkout: Path) -> None:
    for path in written:
        original = tiny.checkout() / path.relative_to(checkout)
        if original.exists():
            shutil.copy(original, path)
        else:
            path.unlink()


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
        written = move(place, copy)
        try:
            assert compatibility.check_target(target, copy).verdict == "moved"
            checks = [(place.module, place.name), ("library.elsewhere", place.name)]
            done = subprocess.run(
                [str(tiny.python()), "-c", code.replace("{checks!r}", repr(checks))], cwd=copy, check=False,
                env=tiny.environment(tiny.site()), capture_output=True, text=True, timeout=400,
            )  # fmt: skip
        finally:
            restore(written, copy)
        assert done.stdout.strip().endswith("guarded"), (target, done.stdout[-500:], done.stderr[-3000:])
