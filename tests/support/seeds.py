"""What is drawn: the seed of a campaign (HANGPROOF_SEED, or a new one, which is printed), and values for Hypothesis."""

import functools
import os
import secrets

from hypothesis import strategies as st

# Values that a file or a browser may hold.
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@functools.cache
def seed() -> int:
    """Return the seed of this process's campaigns; the first call prints it."""
    number = int(os.environ.get("HANGPROOF_SEED") or secrets.randbelow(10_000))
    print(f"seed {number}", flush=True)
    return number


def examples(usual: int) -> int:
    """Return how many examples Hypothesis draws: `usual`, times HANGPROOF_EXAMPLES in a campaign."""
    return usual * int(os.environ.get("HANGPROOF_EXAMPLES") or 1)
