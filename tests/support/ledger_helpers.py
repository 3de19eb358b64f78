"""A run's folder with a history of hours, for its ledger."""

import json


def write_history(folder, price: float = 0.0) -> None:
    """Events of a run that hung once."""
    at = lambda s: {"t": f"2026-11-22T10:{s // 60:02}:{s % 60:02}.000Z", "mono_s": float(s), "boot": "b"}  # noqa: E731
    rows = [
        {**at(0), "kind": "started", "attempt": 1, "step": 0},
        {**at(60), "kind": "phase", "phase": "step", "step": 1},
        {**at(360), "kind": "hang", "step": 40, "since_s": 60.0},
        {**at(370), "kind": "restarted", "attempt": 2, "step": 30},
        {**at(400), "kind": "phase", "phase": "step", "step": 31},
        {**at(1100), "kind": "checkpoint", "step": 100},
        {**at(1100), "kind": "completed", "message": "done"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(f'name = "{folder.name}"\nprice_per_hour = {price}\n')
