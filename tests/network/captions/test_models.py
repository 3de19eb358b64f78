"""The table of models that write captions, and their download."""

import pytest
from hub_server import serving
from runs_helpers import PROJECT
from tiny_tagger import TAGS, tagger_model

from captions import models, tagger
from runs.files import RunError


def test_the_models_of_the_table():
    rows = models.captioners()
    assert {row.engine for row in rows.values()} == {"florence", "tagger"}
    assert models.find("florence", "") is rows["florence-2-base"]
    for name in ("no-such-model", "x" * 300, "~nobody/model"):
        with pytest.raises(RunError, match="use one of wd-vit-v3"):
            models.find("tagger", name)
    with pytest.raises(RunError, match="has no model.onnx"):
        models.find("tagger", str(PROJECT))


def test_a_model_is_downloaded_with_the_projects_own_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    files = {path.name: path.read_bytes() for path in tagger_model(tmp_path / "model").iterdir()}
    row = models.Captioner("t", "tagger", "T", "", "me/model", "", ("model.onnx", "selected_tags.csv"), 1, 0.0)
    lacking = models.Captioner("l", "florence", "L", "", "me/model", "", ("*.json",), 1, 0.0)
    with serving(files | {"model.msgpack": b"x" * 1000}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert models.present(row) is None
        folder = models.fetch(row, lambda line: None)
        assert tagger.read_tags(folder / "selected_tags.csv") == TAGS and not hub.sent_of("model.msgpack")
        assert models.present(row) == folder
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "second"))
        with pytest.raises(RunError, match=r"has no config\.json"):
            models.fetch(lacking, lambda line: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RunError, match="HF_HUB_OFFLINE"):
        models.fetch(lacking, lambda line: None)
