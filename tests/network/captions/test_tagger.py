"""The tagger: how it sees an image, which tags it gives, and files that are not one."""

import sys

import onnxruntime
import pytest
from PIL import Image
from tiny_tagger import TAGS, tagger_model

from captions import tagger
from captions.text import NoCaption
from runs.files import RunError


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_tagger_sees_bgr_on_a_white_square(tmp_path, channels_first):
    model = tagger_model(tmp_path / "model", channels_first=channels_first)
    describe = tagger.load(model, general=0.2, character=0.8)
    # White above and below makes blue 0.5, green 0.75 and red 1.
    caption = describe(Image.new("RGB", (64, 32), (255, 128, 0)))
    assert caption == "alice (wonderland), o_o, solo, blue sky, red, long hair"
    with pytest.raises(NoCaption, match="lower them"):
        tagger.load(model, general=1.1, character=1.1)(Image.new("RGB", (8, 8)))


def test_thresholds_blacklist_and_underscores():
    found = [0.9, 0.5, 0.36, 0.34, 0.99, 0.84, 0.35]
    assert tagger.caption_of(TAGS, found) == "red, long hair, blue sky, solo"
    assert tagger.caption_of(TAGS, found, 0.9, 0.8, underscores=True) == "alice_(wonderland), red"
    assert tagger.caption_of(TAGS, found, without=" Long_Hair ,red,") == "blue sky, solo"


def test_the_gpu_is_used_when_its_memory_is_free(tmp_path, monkeypatch):
    model, used, real = tagger_model(tmp_path / "model"), [], onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    session = lambda file, providers: used.append(len(providers)) or real(file, providers=providers[-1:])  # noqa: E731
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(tagger, "gpu_is_free", lambda gb: gb < 2)
    for gpu_gb in (1.5, 3.0):
        tagger.load(model, gpu_gb)
    assert used == [2, 1], "the processor comes after the GPU"


def test_files_that_are_not_a_tagger_and_a_missing_onnxruntime_are_named(tmp_path, monkeypatch):
    for name, content, message in (
        ("model.onnx", b"\0damaged" * 100, "model.onnx cannot be loaded"),
        ("selected_tags.csv", "hello\n\xff".encode(), "not a table of tags"),
    ):
        model = tagger_model(tmp_path / "model")
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "onnxruntime", None)
            with pytest.raises(RunError, match="pip install onnxruntime"):
                tagger.load(model)
        (model / name).write_bytes(content)
        with pytest.raises(RunError, match=message):
            tagger.load(model)(Image.new("RGB", (8, 8)))
