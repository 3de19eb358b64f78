"""Torch computes without AMX where a virtual machine only announces it."""

import os

import pytest
from runs_helpers import python

from guards import machine
from runs.paths import ROOT

DESCRIBED = "processor\t: 0\ncpuid level\t: {level}\nflags\t\t: fpu avx512_bf16 {flags} serialize\n"
BROKEN = DESCRIBED.format(level=28, flags="amx_bf16 amx_tile amx_int8")
OTHERS = [DESCRIBED.format(level=level, flags=flags) for level, flags in ((31, "amx_tile"), (28, "avx_vnni"))]


def test_only_a_processor_that_announces_amx_undescribed_is_limited_and_a_users_limit_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setenv(machine.ISA_LIMIT, "")  # put back after the test, whatever happens to it
    monkeypatch.delenv(machine.ISA_LIMIT)
    assert machine.avoid_amx() == ""  # no such file: not Linux
    for text in (*OTHERS, "Processor: ARMv8\n", BROKEN):
        assert machine.ISA_LIMIT not in os.environ
        (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
        assert (machine.ISA_LIMIT in machine.avoid_amx()) == (text == BROKEN)
    assert os.environ[machine.ISA_LIMIT] == machine.BELOW_AMX
    monkeypatch.setenv(machine.ISA_LIMIT, "AVX2")
    assert machine.avoid_amx() == "" and os.environ[machine.ISA_LIMIT] == "AVX2"


@pytest.mark.parametrize("command", [("trainer", "--help"), ("sd_scripts_patches", "-m", "platform")], ids=" ".join)
def test_the_trainers_start_with_the_limit(tmp_path, monkeypatch, command):
    (tmp_path / "cpuinfo").write_text(BROKEN, encoding="utf-8")
    redirected = f"import pathlib, guards.machine; guards.machine.PROC = pathlib.Path({str(tmp_path)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(redirected, encoding="utf-8")
    monkeypatch.delenv(machine.ISA_LIMIT, raising=False)
    done = python("-m", *command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert f"{machine.ISA_LIMIT}={machine.BELOW_AMX}" in done.stdout + done.stderr
