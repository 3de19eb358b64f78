"""Every known wait of kohya's trainers is found, and none of a preset's run is open."""

from pathlib import Path

import audit_waits
import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

KNOWN = Path(__file__).resolve().parents[1] / "support/data/known_waits.tsv"
VERSIONS = {
    "v0.10.1": TRAINERS["sd-scripts"].tested[0],
    "v0.11.1": TRAINERS["sd-scripts"].commit,
    "musubi": TRAINERS["musubi"].commit,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_known_waits_are_found_and_none_is_open(version):
    named = [tiny_musubi.checkout()] if version == "musubi" else tiny.checkouts()
    folder = next((one for one in named if versions.commit(one) == VERSIONS[version]), None)
    if folder is None:
        pytest.skip(f"no checkout of {version} at {VERSIONS[version][:8]}")
    report = audit_waits.audit(folder)
    rows = [tuple(line.split("\t")) for line in KNOWN.read_text(encoding="utf-8").splitlines()]
    known = [row[1:] for row in rows if row[0] == version]
    found = {(wait.file, wait.function, wait.kind) for wait in report.waits}
    assert len(known) > 10 and set(known) <= found
    assert not report.open and not report.unread
    ended = {wait.by for wait in report.waits}
    assert {cover.patch for cover in audit_waits.COVERS} - ended <= (
        {"npz", "images", "hygiene"} if version == "musubi" else {"caches"}
    )
