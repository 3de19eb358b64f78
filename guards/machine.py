"""A machine whose processor does not support the instructions that it announces.

Some virtual machines have the flag `amx_tile` and no CPUID leaf 0x1D, which says how large the tiles are. oneDNN,
the library that computes for torch on the processor, then configures no tile, and the first bfloat16 product ends the
process with SIGILL (github.com/uxlfoundation/oneDNN/issues/5689; seen with torch 2.13.0). Linux shows both; on Windows
Python cannot see the leaf.
"""

from __future__ import annotations

import os
import re

from guards.reading import PROC, read_text

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
BELOW_AMX = "AVX512_CORE_BF16"


def avoid_amx() -> str:
    """Limit oneDNN in this process and its children, before torch computes. A line for the log, "" for no change.

    A limit that the user has set stays.
    """
    cpuinfo = read_text(PROC / "cpuinfo")
    level = re.search(r"^cpuid level\s*: (\d+)", cpuinfo, re.MULTILINE)
    tiles = re.search(r"^flags\s*:.*\bamx_tile\b", cpuinfo, re.MULTILINE)
    if ISA_LIMIT in os.environ or level is None or int(level[1]) >= 0x1D or tiles is None:
        return ""
    os.environ[ISA_LIMIT] = BELOW_AMX
    return f"this virtual machine announces AMX but does not support it: {ISA_LIMIT}={BELOW_AMX}"
