"""Phases of the heartbeat that all patches share."""

import pytest

from sd_scripts_patches import session


def test_phases_nest_and_the_record_keeps_the_one_that_failed():
    beat = session.heartbeat()
    beat.phase("step")
    with session.phase("save"):
        with session.phase("hash"):
            assert beat.current_phase == "hash"
        assert beat.current_phase == "save"
    assert beat.current_phase == "step"
    with pytest.raises(OSError), session.phase("save"):
        raise OSError("disk full")
    assert beat.current_phase == "save"
    beat.phase("step")
