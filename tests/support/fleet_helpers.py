"""Runs in a store that is a folder or an address, as their agents write them."""

import hashlib
import io
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image

from launch.store.lease import this_owner
from launch.store.manifest import Manifest, Member
from launch.store.places import open_place


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


def put_sample(
    store: Path | str, content: bytes, name: str = "run/sample/far-cat_000040.png", slug: str = "far-cat"
) -> None:
    """A manifest that names one sample, and its contents."""
    place = open_place(str(store)).under(slug)
    member = Member(hashlib.sha256(content).hexdigest(), len(content), 5.0)
    place.put(member.blob, content)
    manifest = Manifest(slug, 1, 1, 40, False, "a machine", "2026-11-22T10:00:00Z", {name: member})
    place.put(manifest.name, manifest.dumps())


def picture(size: tuple[int, int] = (64, 48)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(out, "PNG")
    return out.getvalue()
