"""A stand-in for NVML that does what a driver with a lost GPU does: `HANGPROOF_NVML=benchmarks.faults_nvml`.

FAULTS_NVML=fails: every call raises. FAULTS_NVML=hangs: it starts, and the first question is never answered. It leaves the
file FAULTS_NVML_ASKED, so that it is known to have been asked.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class NVMLError(Exception):
    """As pynvml's."""


def nvmlInit() -> None:
    Path(os.environ["FAULTS_NVML_ASKED"]).touch()
    if os.environ["FAULTS_NVML"] == "fails":
        raise NVMLError("GPU is lost")


def nvmlDeviceGetCount() -> int:
    time.sleep(24 * 3600)
    return 0
