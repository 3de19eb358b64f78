"""Whether a path is on a network disk is read from the table of mounts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from lint_corpus import GOOD, UNGUARDED, plus

from presets.lint import lint


@pytest.mark.parametrize(
    ("script", "paths", "found"),
    [
        (UNGUARDED, "--train_data_dir '/share/my cats'", True),
        (GOOD, "--train_data_dir '/share/my cats'", False),  # the guards bound its reads
        (GOOD, "--output_dir cats/out", True),  # in the folder of the script
        (GOOD, "--output_dir /share2/out", False),
        (GOOD, '--output_dir "$OUT"', False),
    ],
)
def test_a_network_disk_is_named_and_left_to_a_person(script, paths, found, monkeypatch):
    mounts = {"/": "ext4", "/share": "nfs4"}
    table = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounts.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: table)
    text = plus(paths, script)
    (*_, last) = lint(text, base=Path("/share")) or [None]
    assert (last is not None and last.id == "network-disk" and not last.fixable) == found
