"""The shape that keeps the code readable: who may import whom, and who writes what."""

import ast
import re
import sys
from dataclasses import fields

import pytest
from runs_helpers import python

from monitor.state import RunState
from runs.paths import ROOT

FILES = sorted((ROOT / "monitor").rglob("*.py"))
ARROWS = {  # folder: what it may import of ours
    "presets": (),
    "guards": (),
    "runs": ("presets", "guards", "trainer.arguments"),  # which flags the built-in trainer takes
    "captions": ("runs", "presets", "guards"),
    "sd_scripts_patches": ("guards",),
    "trainer": ("guards",),
    "monitor": ("guards", "runs", "presets"),
    "jobs": ("monitor", "runs", "presets", "guards"),
    "launch": ("jobs", "monitor", "runs", "presets", "guards"),
}


def imports(path) -> set[str]:
    """What the file imports, also inside a function: modules, and names as `module.name`. Types alone do not count."""
    found, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def module_of(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_follow_the_arrows(folder):
    ours = {path.parent.name for path in ROOT.glob("*/*.py")} | {"app"}
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imports(path):
            allowed = any(name == arrow or name.startswith(f"{arrow}.") for arrow in (folder, *ARROWS[folder]))
            parent = any(arrow.startswith(f"{name}.") for arrow in ARROWS[folder])  # `trainer` of `trainer.arguments`
            if name.partition(".")[0] in ours and not allowed and not parent:
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def test_no_import_circle_not_even_inside_functions():
    modules = {module_of(p) for p in FILES}
    graph = {module_of(p): imports(p) & modules - {module_of(p), "monitor.__init__"} for p in FILES}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " → ".join([*path, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_only_the_loop_and_recovery_change_the_state_of_a_run():
    names = {f.name for f in fields(RunState)}
    found = []
    for path in FILES:
        if path.name in ("loop.py", "supervisor.py", "recovery.py", "state.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            changed = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names
            if changed and ast.unparse(node.value).endswith("state"):
                found.append(f"{path.name}:{node.lineno}")
    assert not found


def test_each_function_of_the_documented_walk_of_a_hang_exists():
    document = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    text = document.partition("## The files that a hang passes")[2]
    steps = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", "\n".join(re.findall(r"^\d+\. .*$", text, re.MULTILINE)))
    assert len(steps) > 15
    for file, name in steps:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"def {name.rpartition('.')[2]}\(", code), (file, name)


def test_the_monitors_process_holds_no_library_and_none_of_the_large_modules():
    """It sleeps beside the training for hours: OpenSSL (`hashlib`) alone is 4 MB, pydantic 20 MB."""
    loaded = python("-c", "import sys, monitor.supervisor; print(*sys.modules)").stdout.split()
    assert loaded and not {"hashlib", "ssl", "urllib.request", "http.client", "argparse", "asyncio"} & set(loaded)
    ours = {"monitor", *ARROWS["monitor"], "__main__", "sitecustomize", "_distutils_hack"}
    assert {name.partition(".")[0] for name in loaded} <= sys.stdlib_module_names | ours


# What has no test file of its own name: members of a family of alike modules, what others are made of, and modules
# too small for a promise.
TESTED_TOGETHER = {
    "trainer/buckets.py": "tests/upstream/ui/dataset/test_bucket_preview.py",
    "trainer/tiny_flux.py": "tests/trainer/trainer/test_states.py",
    "trainer/families": "tests/trainer/trainer/test_families.py",
    "launch/common.py": "tests/unit/launch/test_main.py",
    "presets/syntax.py": "tests/unit/presets/test_shell.py",
    "sd_scripts_patches/musubi/heartbeat.py": "tests/upstream/sd_scripts_patches/musubi/test_resume.py",
    "runs/examples.py": "tests/campaigns/test_short_runs.py",
    "sd_scripts_patches/patch.py": "tests/process/sd_scripts_patches/test_hooks.py",
    "sd_scripts_patches/registry.py": "tests/unit/sd_scripts_patches/test_shapes.py",
    "sd_scripts_patches/session.py": "tests/process/sd_scripts_patches/test_heartbeat.py",
    "sd_scripts_patches/timeouts.py": "tests/unit/sd_scripts_patches/test_main.py",
    "sd_scripts_patches/train_loop.py": "tests/upstream/sd_scripts_patches/test_resume.py",
    "sd_scripts_patches/trainers.py": "tests/unit/sd_scripts_patches/test_shapes.py",
}
SMALL = 45  # lines


@pytest.mark.parametrize("folder", [*ARROWS, "ui"])
def test_each_module_has_its_tests_under_its_own_path(folder):
    assert all((ROOT / file).is_file() for file in TESTED_TOGETHER.values())
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        place = path.parent.relative_to(ROOT)
        small = path.name == "__init__.py" or len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        if small or {place.as_posix(), (place / path.name).as_posix()} & TESTED_TOGETHER.keys():
            continue
        if not any((ROOT / "tests").glob(f"*/{place}/test_{path.stem.strip('_')}.py")):
            missing.append(f"{place}/{path.name}")
    assert not missing, "a test of each of them belongs into tests/*/FOLDER/test_NAME.py"
