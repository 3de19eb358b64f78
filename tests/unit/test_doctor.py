"""What `./start.sh doctor` says of a trainer; the complete command: tests/process/test_doctor.py."""

import json
import sys

from runs_helpers import executable

import doctor
from runs.machine import Machine
from sd_scripts_patches.trainers import CUDA, CUDA_INDEX, TRAINERS


def test_what_is_not_installed_is_a_note_and_what_is_half_installed_a_failure_with_its_fix(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    for name, place in (("SD_SCRIPTS_DIR", "s"), ("MUSUBI_DIR", "m"), ("MUSUBI_VENV", "v")):
        monkeypatch.setenv(name, str(tmp_path / place))
    (absent,) = doctor.installed(TRAINERS["sd-scripts"], quick=True)
    assert absent.status == "note" and "./start.sh sd-scripts installs v0." in absent.text
    _, half = doctor.installed(TRAINERS["musubi"], quick=True)
    assert (half.status, half.action) == ("failed", "Run ./start.sh musubi.") and str(tmp_path / "v") in half.text
    python = executable(tmp_path / "python", """#!/bin/sh\necho '{"python": "3.12.1", "start": "fork"}'\n""")
    _, lacks = doctor.python_versions("musubi", python, "Delete it.")
    assert (lacks.status, lacks.text, lacks.action) == ("failed", "PyTorch is not installed", "Delete it.")


def test_the_cpu_build_of_pytorch_beside_a_gpu_is_a_failure_with_the_command_that_replaces_it(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine("RTX 4070", 12.0, False, 100.0))
    found = {"python": "3.12.1", "start": "spawn", "torch": "2.13.0+cpu", "cuda_build": "", "cuda": False}
    python = executable(tmp_path / "python", f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    _, pytorch, _ = doctor.python_versions("Hangproof", python, "Delete it.")
    assert pytorch.status == "failed" and "built for the processor only; it cannot use the GPU" in pytorch.text
    install = f"{python} -m pip install --extra-index-url {CUDA_INDEX} torch==2.13.0+{CUDA}"
    assert pytorch.action == f"Run {install}"


def test_what_a_machine_without_an_nvidia_gpu_can_train(monkeypatch):
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine("", None, False, 100.0))
    for system, text in (("linux", "only the toy model can be trained"), ("darwin", "an Apple GPU (MPS)")):
        monkeypatch.setattr(sys, "platform", system)
        assert [text in one.text for one in doctor.gpu()] == [True]


def test_every_question_to_a_process_has_an_answer():
    for command, answer in (
        ([sys.executable, "-c", "print('warming up'); print('{\"a\": 1}')"], {"a": 1}),
        ([sys.executable, "-c", "print('[]')"], "it printed no answer"),
        ([sys.executable, "-c", "import sys; sys.exit('no driver')"], "no driver"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "it did not answer within 1 s"),
        (["/no/such/program"], "it cannot be started: No such file or directory"),
    ):
        assert doctor.ask(command, 1.0 if "sleep" in command[-1] else 60.0) == answer
