"""An update of sd-scripts trains as the version before it. For a new commit: SD_SCRIPTS_DIR names the old checkout, SD_SCRIPTS_0111 the new one."""

import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny

TOLERANCE = 0.001  # of a loss; other versions of PyTorch round differently, by about 0.00001 within these steps


def test_both_versions_learn_the_same_from_the_same_tiny_weights(tmp_path, monkeypatch):
    tiny.need()
    work, found = tiny.workdir(), []
    for checkout in tiny.checkouts():
        monkeypatch.setenv("SD_SCRIPTS_DIR", str(checkout))
        file = tmp_path / checkout.name
        arguments = tiny.arguments(work, tmp_path / "out", max_train_steps="20")
        result = helpers.train(work, arguments, TINY_LOSSES=str(file))
        assert result.code == 0, result.log[-3000:]
        found.append([loss for *_, loss in tiny.losses(file)])
    assert len(found) == 2 and len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], rel=TOLERANCE)
