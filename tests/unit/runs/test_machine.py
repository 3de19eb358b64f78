"""The machine: its GPU through a stand-in for the driver, its tier, and the trainer's torch without importing it."""

import re

import psutil
import pytest
from runs_helpers import PROJECT, made, python

from runs import machine

SHIM = PROJECT / "tests/support/shims/nvml"
ASK = "import sys; from runs import machine as m; m.DRIVER_TIMEOUT_S = {}; print(m.this_machine(), 'torch' in sys.modules)"


def test_a_gpu_or_that_it_is_hidden_or_its_driver_fails_or_hangs_is_a_plain_answer_without_importing_torch(tmp_path):
    (tmp_path / "values").write_text('{"used_gib": null}')
    shared = rf"vram_gb={psutil.virtual_memory().total / 2**30:.1f}, .* note='', vram_free_gb=\d"
    for env, says in (
        ({}, "gpu_name='Stand-in', vram_gb=24.0.* note=''"),
        ({"FAULTS_NVML_VALUES": str(tmp_path / "values")}, shared),  # GB10: it uses the machine's memory
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "gpu_name='', vram_gb=None"),
        ({"FAULTS_NVML": "lost"}, "note='the NVIDIA driver failed: GPU is lost'"),
        ({"FAULTS_NVML": "hangs"}, "driver could not be read: it did not answer within 1 s; restart the machine"),
    ):
        limit_s = 1 if "hangs" in env.values() else 60
        found = python("-c", ASK.format(limit_s), PYTHONPATH=str(SHIM), **env).stdout
        assert re.search(says, found) and found.endswith(" False\n"), "torch is not imported"


def test_the_gpus_of_a_run_are_those_that_the_environment_leaves_it(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", False)
    assert machine._visible(2) == [0, 1]
    for chosen, left in (("1,0", [1, 0]), ("7, 1, 2", [1]), ("", []), ("GPU-a1", [0, 1])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert machine._visible(2) == left


def test_the_tier_is_the_largest_that_the_gpu_has_memory_for():
    for vram_gb, tier in ((None, "12G"), (8.0, "12G"), (15.0, "12G"), (15.99, "16G"), (79.6, "20G")):
        assert machine.tier_for(machine.Machine("Stand-in" if vram_gb else "", vram_gb, True, 100.0)) == tier


@pytest.mark.parametrize("folder", ["lib/python3.11/site-packages", "Lib/site-packages"])
def test_a_cuda_build_is_recognized_in_the_backends_environment(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("SD_SCRIPTS_VENV", str(tmp_path))
    assert not machine.cuda_build("sd-scripts")
    package = made(tmp_path / folder / "torch")
    for text, cuda in (
        ("__all__ = ['cuda']\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", False),
        ("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n", True),
        ("__version__ = '2.4.1'\ncuda = '12.4'\n", True),
        ("", False),
    ):
        (package / "version.py").write_text(text)
        assert machine.cuda_build("sd-scripts") is cuda


def test_the_free_space_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert machine.free_gb(tmp_path / "not" / "yet") == pytest.approx(machine.free_gb(tmp_path), rel=0.05)
