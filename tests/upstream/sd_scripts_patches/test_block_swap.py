"""Block swaps that hang, in sd-scripts' own classes; those of musubi-tuner are in musubi/test_hangs.py."""

import patches_helpers as helpers
from patches_probes import PROBES, SWAP, check


@helpers.asks("result", *(name for name, probe in PROBES.items() if probe.source == SWAP))
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(result):
    check(*result)
