"""The seed of a campaign: HANGPROOF_SEED, or a new one. It is printed, so that a failed campaign can be repeated."""

import functools
import os
import secrets


@functools.cache
def seed() -> int:
    """Return the seed of this process's campaigns; the first call prints it."""
    number = int(os.environ.get("HANGPROOF_SEED") or secrets.randbelow(10_000))
    print(f"seed {number}", flush=True)
    return number


def examples(usual: int) -> int:
    """Return how many examples Hypothesis draws: `usual`, times HANGPROOF_EXAMPLES in a campaign."""
    return usual * int(os.environ.get("HANGPROOF_EXAMPLES") or 1)
