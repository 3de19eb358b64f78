"""Which model computes the likeness of samples and training images, and what is read of its results."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ANY_VALUE

import runs
from runs import likeness
from runs.files import RunError
from ui.run import evolution


def test_a_model_in_the_cache_of_the_hub_is_found_and_none_is_downloaded(data, monkeypatch):
    from huggingface_hub import constants

    (data / "outputs" / "cat" / "sample").mkdir(parents=True)
    (data / "outputs" / "cat" / "run.toml").write_text('name = "cat"\n')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(data / "hub"))
    repo = data / "hub" / "models--facebook--dinov2-base"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text('{"model_type": "dinov2"}')
    assert likeness.find_model() is None  # without its weights
    for name in ("model.safetensors", "preprocessor_config.json"):
        (snapshot / name).write_text("{}")
    assert likeness.find_model() == likeness.Model(snapshot, "DINOv2 base")
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    assert likeness.find_model() is None
    with pytest.raises(RunError, match=r"hf download facebook/dinov2-small .* \(88 MB\)"):
        evolution.likeness_start("cat")
    assert evolution.summary(runs.run_folder("cat"))["likeness"]["missing"] == likeness.ABSENT


@settings(max_examples=40)
@given(ANY_VALUE | st.fixed_dictionaries(dict.fromkeys(("model", "images", "own", "samples"), ANY_VALUE)))
def test_any_file_of_scores_is_read(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("scores")
    (folder / likeness.FILE).write_text(json.dumps(values))
    found = likeness.read(folder)
    assert all(-1.01 <= score <= 1.01 for score in found.scores.values())
    found.of(["a"])
