"""A tracker that never starts, of a run that fails. One of a run that goes on is in tests/upstream/test_sd_scripts.py."""

import patches_helpers as helpers
from patches_probes import PROBES, SWAP, check


@helpers.asks("result", *(name for name, probe in PROBES.items() if probe.real and probe.source != SWAP))
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(result):
    check(*result)
