"""Makes the trainer of a standby attempt import for ever. First on PYTHONPATH."""

import os
import sys
import time

if "HANGPROOF_GATE" in os.environ and "trainer" in sys.orig_argv:
    time.sleep(1000)
