"""A virtual machine that announces AMX and does not support it: torch computes without."""

import os
import subprocess
import sys

import pytest

from guards import amx

DESCRIBED = "processor\t: 0\ncpuid level\t: {level}\nflags\t\t: fpu avx512_bf16 {flags} serialize\n"
BROKEN = DESCRIBED.format(level=28, flags="amx_bf16 amx_tile amx_int8")
PRODUCT = """
from guards import amx
print(amx.avoid())
import torch
a = torch.ones(16, 64, dtype=torch.bfloat16)
print(float((a @ a.T).sum()))
"""


@pytest.mark.parametrize(
    ("level", "flags", "broken"), [(28, "amx_tile", True), (31, "amx_tile", False), (28, "avx_vnni", False)]
)
def test_which_processors_are_limited(level, flags, broken):
    assert amx.is_broken(DESCRIBED.format(level=level, flags=flags)) is broken
    assert not amx.is_broken("Processor: ARMv8\n")


def test_a_limit_of_the_user_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(amx, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv(amx.LIMIT, raising=False)
    assert amx.avoid() == "" and amx.LIMIT not in os.environ  # no such file: not Linux
    amx.CPUINFO.write_text(BROKEN, encoding="utf-8")
    assert amx.LIMIT in amx.avoid() and os.environ[amx.LIMIT] == amx.BELOW_AMX
    monkeypatch.setenv(amx.LIMIT, "AVX2")
    assert amx.avoid() == "" and os.environ[amx.LIMIT] == "AVX2"


def test_this_machine_computes_bfloat16_products():
    environment = {key: value for key, value in os.environ.items() if key != amx.LIMIT}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == 16 * 16 * 64
