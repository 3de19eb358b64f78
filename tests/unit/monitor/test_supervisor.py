"""The supervisor without a training: each state has a function."""

from monitor.state import FINAL, State
from monitor.supervisor import STATES


def test_every_state_that_is_not_final_has_a_function():
    """An ending without a name once made the loop spin for ever with the GPU held."""
    assert set(STATES) == set(State) - FINAL
