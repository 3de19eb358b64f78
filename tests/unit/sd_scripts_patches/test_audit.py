"""The audit: it finds planted waits and says what ends each; it reads any input. tests/upstream/test_audit.py has real checkouts."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from hypothesis import given, settings
from hypothesis import strategies as st

from guards import limits
from guards.heartbeat import PHASES
from guards.phase_limit import name_of
from sd_scripts_patches import audit, compatibility, patch, registry
from sd_scripts_patches import audit_tables as tables

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests/support/data"


@pytest.mark.parametrize("name", ["audit_planted.txt", "audit_unseen.txt"])
def test_planted_waits_are_found_and_nothing_else(tmp_path, name):
    text = (DATA / name).read_text(encoding="utf-8")
    (tmp_path / "planted.py").write_text(text, encoding="utf-8")
    findings = audit.audit(tmp_path, ()).findings

    def marked(word: str) -> set[int]:
        return {number for number, line in enumerate(text.splitlines(), 1) if f"# {word}" in line}

    endless = {f.line for f in findings if f.bound == audit.OPEN}
    limited = {f.line for f in findings if f.bound == audit.OWN}
    wait, limit, missed = marked("WAIT"), marked("LIMIT"), marked("MISSED")
    right = len(endless & wait)
    print(f"{name}: recall {right} of {len(wait | missed)}, precision {right} of {len(endless)}, limits {len(limited)}")
    assert endless == wait and limited - wait == limit and len(wait) >= 20
    assert len(missed) <= 6


# -- what ends a wait


def scratch(tmp_path: Path, **files: str) -> Path:
    """A checkout of a few lines with one training script."""
    for name, text in {"train_network": "", "library__x": "", "networks__x": "", **files}.items():
        path = tmp_path / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def bounds(folder: Path) -> dict[str, tuple[str, bool]]:
    return {f.function: (f.bound, f.reachable) for f in audit.audit(folder).findings}


MAIN = "\nif __name__ == '__main__':\n    main()\n"


def test_a_wait_that_only_a_tool_reaches_is_open(tmp_path):
    body = "import subprocess\ndef main():\n    subprocess.run(['x'])\n"
    folder = scratch(tmp_path, train_network=body + MAIN, tools__convert=body + MAIN)
    found = {(f.file, f.bound, f.reachable) for f in audit.audit(folder).findings}
    assert found == {("train_network.py", audit.PHASE, True), ("tools/convert.py", audit.OPEN, False)}


def test_a_thread_that_nobody_waits_for_is_open_and_one_that_is_waited_for_is_not(tmp_path):
    text = """
import queue, threading
class A:
    def __init__(self):
        self.inbox = queue.Queue()
        threading.Thread(target=self.forgotten, daemon=True).start()
    def forgotten(self):
        self.inbox.get()
class B:
    def __init__(self):
        self.inbox = queue.Queue()
        self.thread = threading.Thread(target=self.watched, daemon=True)
        self.thread.start()
    def watched(self):
        self.inbox.get()
    def close(self):
        self.thread.join()
def main():
    A()
    B().close()
"""
    found = bounds(scratch(tmp_path, train_network=text + MAIN))
    assert found["A.forgotten"] == (audit.OPEN, True)
    assert found["B.watched"] == (audit.PHASE, True) and found["B.close"] == (audit.PHASE, True)
    assert audit.main([str(tmp_path)]) == 1


def test_what_is_also_called_outside_of_a_deadline_is_not_counted_as_guarded(tmp_path):
    offloading = """
class Offloader:
    def _wait_blocks_move(self, block_idx):
        settle(self.futures)
def settle(futures):
    futures[0].result()
"""
    script = "from library.custom_offloading_utils import Offloader, settle\ndef main():\n    Offloader()._wait_blocks_move(1)\n"
    inside = scratch(tmp_path / "a", library__custom_offloading_utils=offloading, train_network=script + MAIN)
    assert bounds(inside)["settle"] == (audit.GUARD, True)
    both = script.replace("(1)\n", "(1)\n    settle([])\n")
    outside = scratch(tmp_path / "b", library__custom_offloading_utils=offloading, train_network=both + MAIN)
    assert bounds(outside)["settle"] == (audit.PHASE, True)


def test_every_guard_of_the_table_is_a_target_of_its_patch_that_sets_a_limit():
    patches = [one for trainer in compatibility.MARKERS for one in registry.patches(trainer)]
    targets = {(one.name, str(target)): target for one in patches for target in one.targets}
    names = {one.name for one in patches}
    words = (
        "session.limit",
        "Deadline",
        "bounded",
        "deadline.call",
        "call_within",
        "_read(",
        "_within_limit",
        "_with_limit",
        "CacheFirst",
        "sampling._sample_one",
    )
    for guard in tables.GUARDS:
        assert guard.patch in names, guard
        if not guard.target:
            continue
        target = targets.get((guard.patch, guard.target))
        assert target is not None, f"{guard.patch} has no target {guard.target}"
        assert set(guard.kinds) <= set(tables.KINDS), guard
        if guard.limit.endswith("_s"):
            assert guard.limit in limits.TABLE, guard
        if guard.how == tables.WITHIN:
            assert target.make is not None, f"{guard.target}: nothing is put around it"
            source = inspect.getsource(target.make)
            assert any(word in source for word in words), f"{guard.target}: {target.make.__name__} sets no limit"


def test_every_phase_has_a_limit():
    for phase in PHASES:
        assert limits.TABLE[name_of(phase)].default_s > 0


def test_the_scripts_of_the_presets_are_those_that_the_audit_starts_from():
    families = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "presets/families").glob("*.toml")]
    named = {text for family in families for text in texts(family) if re.fullmatch(r"\w+\.py", text)}
    assert named and named <= set(tables.SCRIPTS), named - set(tables.SCRIPTS)


def texts(value) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


# -- any input


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    folder = scratch(tmp_path, train_network="def broken(:\n")
    (folder / "nul.py").write_bytes(b"x = 1\0")
    (folder / "latin.py").write_bytes("x = 'ü'".encode("latin-1"))
    (folder / "deep.py").write_text("x = " + "(" * 5000 + "1" + ")" * 5000)
    (folder / "long.py").write_text("x = " + "+".join(["1"] * 20000))
    os.mkfifo(folder / "pipe.py")
    (folder / "loop").symlink_to(folder)
    assert audit.main([str(folder)]) == 1
    shown = capsys.readouterr().out
    for name in ("train_network.py", "nul.py", "latin.py", "deep.py"):
        assert f"Not judged: {name}: " in shown
    assert "pipe.py" not in shown


@pytest.mark.parametrize("arguments, code", [([], 2), (["-x"], 2), (["a", "b"], 2), (["a", "--against"], 2)])
def test_wrong_usage_exits_with_2(arguments, code, capsys):
    assert audit.main(arguments) == code
    assert "usage:" in capsys.readouterr().err


def test_a_folder_without_code_or_that_is_missing_exits_with_1(tmp_path, capsys):
    assert audit.main([str(tmp_path)]) == 1 and audit.main([str(tmp_path / "none")]) == 1
    shown = capsys.readouterr().err
    assert "holds no training script" in shown and "is not a folder" in shown


def test_json_is_one_value_and_against_lists_what_was_added(tmp_path):
    old = scratch(tmp_path / "old", train_network="import time\ndef main():\n    open('a')\n" + MAIN)
    moved = "import time\ndef main():\n    open('a')\ndef more(future):\n    while True:\n        time.sleep(1)\n"
    new = scratch(tmp_path / "new", library__moved=moved, train_network="from library.moved import main" + MAIN)
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", "audit", str(new), "--against", str(old), "--json"],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and answer["ok"], done.stderr
    assert [(f["function"], f["kind"], f["reachable"]) for f in answer["added"]] == [("more", "polling", False)]
    assert answer["removed"] == [] and answer["reachable"]["phase limit"] == 1
    assert {"file", "line", "function", "kind", "call", "bound", "by", "reachable"} == set(answer["waits"][0])


SNIPPETS = [path.read_text(encoding="utf-8") for path in (DATA / "audit_planted.txt", DATA / "audit_unseen.txt")]
SNIPPETS += [(ROOT / "sd_scripts_patches" / name).read_text(encoding="utf-8") for name in ("hub.py", "exit.py")]


@settings(max_examples=150)
@given(data=st.data())
def test_cut_and_mixed_source_never_ends_in_a_traceback(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    for name in ("train_network.py", "library/a.py", "src/musubi_tuner/__init__.py"):
        lines = data.draw(st.sampled_from(SNIPPETS)).splitlines()
        start = data.draw(st.integers(0, len(lines)))
        kept = lines[start : start + data.draw(st.integers(0, 60))]
        for _ in range(data.draw(st.integers(0, 3))):
            if kept:
                at = data.draw(st.integers(0, len(kept) - 1))
                kept[at] = data.draw(
                    st.sampled_from(["", "    pass", kept[at].strip(), kept[at][:-1], "class A(A): pass"])
                )
        text = "\n".join(kept)
        indent = min((len(line) - len(line.lstrip()) for line in kept if line.strip()), default=0)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[indent:] for line in text.split("\n")), encoding="utf-8")
    one = audit.audit(folder, ())
    audit.format_table(one)


NAMES = st.sampled_from(
    ["a", "b", "self", "future", "queue", "wait", "accelerator", "A", "B", "get", "result", "futures"]
)


@st.composite
def programs(draw) -> str:
    """Statements that refer to each other in circles: names bound to themselves, classes that inherit from themselves."""
    lines = []
    for _ in range(draw(st.integers(1, 25))):
        x, y, z = draw(NAMES), draw(NAMES), draw(NAMES)
        lines.append(
            draw(
                st.sampled_from(
                    [
                        f"{x} = {y}",
                        f"{x} = {y}.{z}",
                        f"{x}.{y} = {z}()",
                        f"{x} = {y}[{z}]",
                        f"class {x}({y}): {z} = {x}",
                        f"class {x}({y}):\n    def {z}(self): self.{y} = self.{z}(); return self.{y}.{x}()",
                        f"def {x}({y}): return {z}({x})",
                        f"for {x} in {y}: {z}()",
                        f"with {x} as {y}: {y}.{z}()",
                        f"from {x} import *",
                        f"from train_network import {y} as {z}",
                        f"from . import {x}",
                        f"from ... import {x}",
                        f"import {x}.{y} as {z}",
                        f"{x} = [{y} for {y} in {z}]",
                        f"while {x}.{y}(): {z}()",
                        f"{x} = lambda: {y}.{z}()",
                        f"async def {x}(): await {y}.{z}()",
                        f"({x} := {y}).{z}()",
                        f"def {x}({y}: '{z}'): {y}.wait()",
                        f"{x}: list[{y}] = {z}",
                        f"global {x}",
                        f"del {x}",
                    ]
                )
            )
        )
    return "\n".join(lines)


@settings(max_examples=300)
@given(one=programs(), two=programs())
def test_names_that_refer_to_each_other_in_circles_are_read(one, two, tmp_path_factory):
    folder = tmp_path_factory.mktemp("circle")
    (folder / "a").mkdir()
    (folder / "train_network.py").write_text(one)
    (folder / "a/__init__.py").write_text(two)
    (folder / "b.py").write_text(one)
    audit.format_table(audit.audit(folder, ()))


@settings(max_examples=150)
@given(
    content=st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace")))
)
def test_random_bytes_are_read(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "train_network.py").write_bytes(content)
    audit.format_table(audit.audit(folder, ()))


def test_a_patch_left_out_bounds_nothing(tmp_path):
    text = "def main(accelerator):\n    accelerator.wait_for_everyone()\n"
    folder = scratch(tmp_path, train_network=text + MAIN)
    found = audit.audit(folder, [patch.Patch("none", "nothing")]).findings
    assert [f.bound for f in found] == [audit.PHASE]
    assert [f.bound for f in audit.audit(folder).findings] == [audit.GUARD]
