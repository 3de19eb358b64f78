"""Everything of a run is killed while a checkpoint is copied, and an empty machine continues from the store alone: the same bytes.

tests/campaigns/test_preemption.py kills 20 times for each kind of store.
"""

import pytest

from benchmarks import preemption


@pytest.mark.slow
def test_a_run_killed_while_it_copies_continues_on_an_empty_machine(tmp_path):
    made = preemption.training_of("toy", 1)
    result = preemption.campaign(made, str(tmp_path / "store"), 1, 7, tmp_path / "machines", {}, {"lease_s": 3})
    assert not result["violations"], "\n".join(result["violations"])
    # Saves follow each other so closely that a copy can take as long as an interval.
    assert result["kills"] == 1 and result["repeated_max"] <= 2 * result["save_interval"]
