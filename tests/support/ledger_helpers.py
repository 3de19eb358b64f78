"""A status of a run with a history of hours, for its ledger."""

import json


def write_history(folder, price: float = 0.0) -> None:
    """The ledger of a run that hung once, in its `status.json`."""
    seconds = {"training": 925.0, "loading": 60.0, "waiting": 0.0, "recovering": 40.0, "lost": 75.0}
    steps = {"steps": 100, "repeated": 10, "kept_steps": 30, "made_steps": 110, "failures": 1, "recovered": 1}
    path = folder / "status.json"
    ledger = {"seconds": seconds, **steps, "made_s": 940.0, "price_per_hour": price}
    path.write_text(json.dumps({**json.loads(path.read_text()), "ledger": ledger}))
