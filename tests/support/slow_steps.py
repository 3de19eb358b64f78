"""Makes the steps of a training slow: `HANGPROOF_INJECT=slow_steps:fire`. TEST_SLOW="FROM_STEP SECONDS LAST_ATTEMPT"."""

import os
import time


def fire(phase: str, step: int, heartbeat) -> None:
    first, seconds, attempt = os.environ["TEST_SLOW"].split()
    if phase == "step" and step >= int(first) and int(os.environ["HANGPROOF_ATTEMPT"]) <= int(attempt):
        time.sleep(float(seconds))
