"""Runs in a store that is a folder or an address, as their agents write them."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from launch.store.lease import this_owner


def put_run(store: Path, slug: str = "far-cat", **status) -> Path:
    """A run in a store that is a folder, as its agent writes it."""
    folder = store / slug
    folder.mkdir(parents=True)
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values = {"name": "far cat", "state": "running", "step": 40, "planned_steps": 100, "loss": 0.25, "updated_at": at}
    (folder / "status.json").write_text(json.dumps({**values, **status}))
    owner = {**asdict(this_owner()), "host": "far.example"}
    (folder / "lease").mkdir()
    claim = {"number": 1, "owner": owner, "beat": 3, "held": True, "released": False, "period_s": 60}
    (folder / "lease" / "000001.json").write_text(json.dumps(claim))
    return folder
