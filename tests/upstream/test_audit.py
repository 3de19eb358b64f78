"""The audit's call graph against runs: what a real run calls must be reached."""

import os
from pathlib import Path

import kohya_nursery
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches import audit_calls, audit_waits
from sd_scripts_patches.audit_source import Project

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
