"""The table of trainers, and what is recorded of them."""

import record_shapes

from sd_scripts_patches import trainers


def test_every_version_that_is_pinned_is_recorded():
    commits = {facts["commit"] for facts in record_shapes.load()}
    assert {trainer.commit for trainer in trainers.TRAINERS.values()} < commits and len(commits) == 3
