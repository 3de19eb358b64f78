"""An update of sd-scripts trains as before: SD_SCRIPTS_DIR names the old checkout, SD_SCRIPTS_0111 the new one."""

import pytest
import resume_helpers
import tiny_sd_scripts as tiny

TOLERANCE = 0.001  # of a loss; other versions of PyTorch round differently, by about 0.00001 within these steps


def test_both_versions_learn_the_same_from_the_same_tiny_weights(tmp_path, monkeypatch):
    tiny.need()
    work, found = tiny.workdir(), []
    for checkout in tiny.checkouts():
        monkeypatch.setenv("SD_SCRIPTS_DIR", str(checkout))
        out = tmp_path / checkout.name
        resume_helpers.train(work, out, max_train_steps="20")
        found.append([loss for *_, loss in tiny.losses(out / "losses")])
    assert len(found) == 2 and len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], rel=TOLERANCE)
