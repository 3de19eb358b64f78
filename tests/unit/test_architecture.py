"""The shape that keeps the code readable: who may import whom; of monitor/ the walk of a hang, who writes what, units in keys."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomllib
from monitor_helpers import ROOT, environment, fault_at, toy_run, undisturbed, weight

from monitor.state import RunState

MONITOR = ROOT / "monitor"
FILES = sorted(MONITOR.rglob("*.py"))
ARROWS = {  # folder: what it may import of ours
    "presets": (),
    "guards": (),
    "runs": ("presets", "guards", "trainer.arguments", "trainer.unsupported"),  # which flags the built-in trainer takes
    "captions": ("runs", "presets", "guards"),
    "sd_scripts_patches": ("guards",),
    "trainer": ("guards",),
    "monitor": ("guards", "runs", "presets"),
    "launch": ("monitor", "runs", "presets", "guards"),
}
SERVICES = {
    "run_folder.py",
    "state.py",
    "phrases.py",
    "process/platform.py",
    "resume/snapshots.py",
    "standby.py",
    "gpu/nvml.py",
    "gpu/queue.py",
    "cli/notify.py",
    "store.py",
    "spend.py",
    "slowdown.py",
    "detect/pace.py",
    "diagnose/slow.py",
}


def readme_walk() -> list[str]:
    """The steps of README's list, as "file:function"."""
    text = (MONITOR / "README.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. .*$", text.partition("## The walk of a hang")[2], re.M)
    return [f"{file}:{name}" for step in steps for file, name in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", step)]


@pytest.mark.skipif(sys.platform == "win32", reason="the toy is a shell script")
def test_the_walk_of_a_hang_is_the_one_in_the_readme_and_has_at_most_12_files(tmp_path):
    folder = toy_run(tmp_path / "toy", fault_at(34, "time.sleep(3600)"), steps=50, pace=0.03, every=10)
    command = [sys.executable, str(ROOT / "tests/support/monitor_walk.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert weight(folder) == undisturbed(50)
    entered = json.loads(done.stdout.splitlines()[-1])
    listed = readme_walk()
    missing = [step for step in listed if step not in entered and step != "resume/script.py:render"]
    assert not missing, f"the README lists what is not entered: {missing}\nentered: {entered}"
    files = {step.partition(":")[0] for step in listed}
    unlisted = {step.partition(":")[0] for step in entered} - files - SERVICES
    assert not unlisted, f"entered, but not in the README: {unlisted}"
    assert len(files) <= 12
    order = [entered.index(step) for step in listed if step in entered]
    once = [n for i, n in enumerate(order) if n not in order[:i]]
    assert once == sorted(once), "the README's order is not that of the walk"


def imports(path: Path) -> set[str]:
    """What the file imports, at the top or inside a function: modules, and names as `module.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_follow_the_arrows(folder):
    ours = {path.parent.name for path in ROOT.glob("*/*.py")} | {"app", "demo"}
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.name == "__main__.py":
            continue  # an entry point puts the parts together
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


def test_nothing_hides_an_import_from_the_interpreter():
    assert not [p for p in FILES if "TYPE_CHECKING" in p.read_text(encoding="utf-8")]


def test_only_the_supervisor_and_recovery_change_the_state_of_a_run():
    names = {f.name for f in fields(RunState)}
    found = []
    for path in FILES:
        if path.name in ("supervisor.py", "recovery.py", "state.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign)
                else []
            )
            for target in targets:
                owner = target.value if isinstance(target, ast.Attribute) else None
                if owner is not None and target.attr in names and ast.unparse(owner).endswith("state"):
                    found.append(f"{path.name}:{node.lineno}")
    assert not found


def test_the_supervisor_is_one_class_without_mixins():
    tree = ast.parse((MONITOR / "supervisor.py").read_text(encoding="utf-8"))
    classes = {node.name: node.bases for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes["Supervisor"] == []


def test_every_key_of_the_configuration_ends_in_its_unit():
    def keys(table: dict, path: str):
        for name, value in table.items():
            if isinstance(value, dict):
                yield from keys(value, f"{path}{name}.")
            else:
                yield path + name

    table = tomllib.loads((MONITOR / "config.toml").read_text(encoding="utf-8"))
    assert not [key for key in keys(table, "") if not key.endswith(("_s", "_bytes", "_count"))]


def test_the_folder_has_at_most_53_files_of_python():
    assert len(FILES) <= 53


def test_the_monitor_reads_no_environment_hook_of_tests():
    text = "".join(p.read_text(encoding="utf-8") for p in FILES)
    assert not re.findall(r"HANGPROOF_(?:CLOCK|NVML|INJECT)", text)


def test_the_monitors_process_holds_none_of_the_large_modules():
    """It sleeps beside the training for hours: OpenSSL (`hashlib`) alone is 4 MB, pydantic 20 MB."""
    code = "import sys, monitor.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    large = {"hashlib", "ssl", "urllib.request", "http.client", "pydantic", "numpy", "psutil", "argparse", "asyncio"}
    assert not large & set(done.stdout.split())
