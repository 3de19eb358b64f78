"""The audit's call graph against runs: what a real run calls must be reached."""

import os
import re
import shutil
from pathlib import Path

import kohya_nursery
import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches import audit, audit_calls, audit_waits, versions
from sd_scripts_patches.audit_source import Project
from sd_scripts_patches.trainers import TRAINERS

TRACE = """
import atexit, os, sys, threading
_seen = set()
def _note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # a function, not the body of a class or module
        _seen.add(frame.f_code)
threading.setprofile(_note)
sys.setprofile(_note)
def _write():
    sys.setprofile(None)
    with open(os.environ["AUDIT_SEEN"], "a", encoding="utf-8") as file:
        for code in list(_seen):
            file.write(f"{code.co_filename}\\t{code.co_firstlineno}\\t{code.co_name}\\n")
atexit.register(_write)
"""


def test_every_function_that_a_real_run_calls_is_reached(work, tmp_path):
    """The call graph is checked against a run: what ran must be reachable."""
    (tmp_path / "trace.py").write_text(TRACE)
    out = tmp_path / "out"
    samples = {"sample_prompts": str(work / "prompts.txt"), "sample_every_n_steps": "1", "sample_sampler": "euler_a"}
    arguments = tiny.arguments(
        work, out, "--save_state", max_train_steps="2", save_every_n_steps="1", save_last_n_steps_state="1",
        log_with="tensorboard", logging_dir=str(out / "logs"), **samples,
    )  # fmt: skip
    env = tiny.environment(
        work, TINY_FAULTS=f"library.utils={tmp_path / 'trace.py'}", AUDIT_SEEN=str(tmp_path / "seen")
    )
    done = tiny.run(arguments, env, 600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(ran_and_reached(tiny.checkout(), tmp_path / "seen")) > 100


def test_every_function_that_a_real_run_of_musubi_calls_is_reached(musubi, tmp_path):
    """Both caching commands and the trainer, without the patches: these call functions that the trainer itself does not."""
    (tmp_path / "trace.py").write_text(TRACE)
    work = tiny_musubi.workdir()
    config = tiny_musubi.dataset(tmp_path, work / "images")
    scripts = tiny_musubi.caching(config)
    scripts["zimage_train_network.py"] = tiny_musubi.arguments(
        work,
        config,
        tmp_path / "out",
        "--save_state",
        max_train_steps="2",
        save_every_n_steps="1",
        save_last_n_steps_state="1",
    )
    env = tiny_musubi.environment(
        work, TINY_FAULTS=f"musubi_tuner.utils.model_utils={tmp_path / 'trace.py'}", AUDIT_SEEN=str(tmp_path / "seen")
    )
    env["PYTHONPATH"] += f"{os.pathsep}{tiny_musubi.checkout() / 'src'}"
    for script, arguments in scripts.items():
        done = kohya_nursery.run(tiny_musubi.command(script, *arguments, patched=False), env, musubi, 600)
        assert done.returncode == 0, done.stdout[-3000:]
    assert len(ran_and_reached(tiny_musubi.checkout(), tmp_path / "seen")) > 100


def ran_and_reached(checkout: Path, seen: Path) -> set[str]:
    """Return the functions of a checkout that a run has called. Fails when the graph does not reach one of them."""
    project = Project(checkout.resolve())
    functions = audit_waits.scan(project)
    reached = audit_calls.build(project, functions).reached
    lines = {}
    for one, node in project.functions.items():
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) if hasattr(node, "lineno") else 0
        lines[project.modules[one.split(":")[0]].file, first] = one
    ran = set()
    for line in seen.read_text(encoding="utf-8").splitlines():
        file, number, name = line.split("\t")
        path = Path(file)
        if name.startswith("<") or not path.is_relative_to(project.folder):
            continue
        one = lines.get((path.relative_to(project.folder).as_posix(), int(number)))
        if one is not None:  # None: a function that is defined twice under one name, or made by a decorator
            ran.add(one)
    lost = sorted(ran - reached)
    print(f"{len(ran)} functions ran, {len(ran) - len(lost)} of them reached; {len(reached)} reached in all")
    assert not lost
    return ran


VERSIONS = {
    "v0.10.1": TRAINERS["sd-scripts"].tested[0],
    "v0.11.1": TRAINERS["sd-scripts"].commit,
    "musubi": TRAINERS["musubi"].commit,
}


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    """Each version in turn: the checkout that is at its pinned commit."""
    return request.param


@pytest.fixture(scope="module")
def report(version):
    """The audit of that version's checkout."""
    named = [tiny_musubi.checkout()] if version == "musubi" else tiny.checkouts()
    folder = next((one for one in named if versions.commit(one) == VERSIONS[version]), None)
    if folder is None:
        pytest.skip(
            f"no checkout of {version} at {VERSIONS[version][:8]}: {tiny.why_not(run=False) or 'set SD_SCRIPTS_0111'}"
        )
    return audit.audit(folder)


def called(call: str) -> str:
    """The last name of a call, or the statement: `for`, `while`, `with`."""
    statement = re.match(r"(for …|while|with|await|async for) ", call)
    return statement[0].split()[0] if statement else re.sub(r"\((…)?\)$", "", call).split(".")[-1]


def test_the_known_waits_are_found(version, report):
    found = {(f.file, f.function, f.kind) for f in report.findings}
    known = [tuple(row[1:]) for row in rows("audit_known.tsv") if row[0] == version]
    missing = [row for row in known if row not in found]
    print(f"{version}: {len(known) - len(missing)} of {len(known)} known waits found")
    assert known and not missing


def test_what_is_found_waits(version, report):
    found = {(f.file, f.function, f.kind, called(f.call)) for f in report.findings}
    for part in ("first", "fresh"):
        labels = {tuple(row[2:6]): row[6] == "yes" for row in rows("audit_labels.tsv") if row[:2] == [part, version]}
        lost = [key for key, waits in labels.items() if waits and key not in found]
        kept = [waits for key, waits in labels.items() if key in found]
        precision = sum(kept) / len(kept)
        print(f"{version}, {part} sample: {sum(kept)} of {len(kept)} places wait: precision {precision:.1%}")
        assert precision >= 0.94 and not lost


def test_nothing_that_a_run_can_reach_is_open(report):
    one = report
    assert one.scripts and not one.unread
    assert [f for f in one.findings if f.reachable and f.bound == audit.GUARD]
    assert not one.open, one.open


def test_the_documents_state_how_many_waits_a_run_can_reach(version, report):
    reached = sum(f.reachable for f in report.findings)
    name = "musubi-tuner 30c658c" if version == "musubi" else version
    assert f"{reached} in {name}" in " ".join((ROOT / "docs/limits.md").read_text(encoding="utf-8").split())


ROOT = Path(__file__).resolve().parents[2]


DATA = ROOT / "tests/support/data"


def rows(name: str) -> list[list[str]]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def test_a_guard_that_lacks_its_target_bounds_nothing(sd_scripts, tmp_path):
    source = sd_scripts
    folder = tmp_path / "copy"
    for part in ("library", "networks"):
        shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in source.glob("*.py"):
        shutil.copy(path, folder)
    before, path = audit.audit(folder), folder / "library/custom_offloading_utils.py"
    path.write_text(path.read_text(encoding="utf-8").replace("_wait_blocks_move", "_await_block"), encoding="utf-8")
    found = {f.function: f for f in audit.audit(folder).findings if f.file == "library/custom_offloading_utils.py"}
    assert found["Offloader._await_block"].bound == audit.PHASE
    gained, lost = audit.added(audit.audit(folder), before)
    assert [f.function for f in gained] == ["Offloader._await_block"]
    assert [f.function for f in lost] == ["Offloader._wait_blocks_move"]
