"""Of two ranks one hangs: it is named, and both are killed and start again."""

import sys

import pytest
from machines_helpers import TOGETHER
from monitor_helpers import supervise, toy_run
from run_facts import completed, incidents, report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="stacks are asked for by a signal")]
HANGS = """
def fault(step):
    if attempt == 1 and node == 1 and step == 35:
        time.sleep(3600)
    barrier(step)
"""


def test_of_two_ranks_the_one_that_hangs_is_named_and_both_start_again(folder):
    toy_run(folder, TOGETHER + HANGS, steps=50, pace=0.02, every=10)
    start = f"WORLD_SIZE=2 {sys.executable} toy.py"
    # As torchrun does: the first that fails ends the group.
    (folder / "train.sh").write_text(
        f"cd {folder}\nRANK=0 {start} & a=$!\nRANK=1 {start} & b=$!\n"
        "wait -n; code=$?\n[ $code = 0 ] || kill -9 $a $b 2>/dev/null\nwait $a && wait $b\n"
    )
    assert supervise(folder, limits="[watch]\nwarmup_floor_s = 1\n")[0] == 0
    (incident,) = incidents(folder)
    assert (incident["kind"], incident["cause"], incident["step"]) == ("hang", "collective", 35)
    text = report(folder)
    assert len(incident["evidence"]["ranks"]) == 2 and "Rank 0 (pid" in text and "Rank 1 (pid" in text
    assert "The other ranks were waiting for rank 1." in text
    completed(folder, restarts=1)
