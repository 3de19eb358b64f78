"""Florence-2 through transformers' own classes: a tiny model with random weights, saved and loaded as the real one."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from caption_server import Folder
from draft_helpers import photo
from PIL import Image

from captions import florence, options
from runs.files import RunError

VISION = {"depths": (1, 1, 1, 1), "embed_dim": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "num_groups": (1, 2, 2, 4)}
VISION |= {"window_size": 2, "projection_dim": 16, "max_position_embeddings": 4, "max_temporal_embeddings": 4}
SIDE = 64  # pixels; the four stages divide it by 32
WORDS = "Describe what is shown in the image. What does the image describe? a photo of the cat and dog on mat with paragraph in detail"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Florence-2 model with random weights, of 150 kB, in the layout of the real one."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("florence")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<image>"]
    words = [*special, *dict.fromkeys(WORDS.replace(".", " .").replace("?", " ?").split())]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    extra = {"image_token": "<image>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **marks)
    square = {"height": SIDE, "width": SIDE}
    pictures = transformers.CLIPImageProcessor(size=square, do_center_crop=False, crop_size=square)
    pictures.image_seq_length = (SIDE // 32) ** 2 + 1
    processor = transformers.Florence2Processor(pictures, fast, num_additional_image_tokens=0)
    text = transformers.BartConfig(
        vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=600, bos_token_id=0,
        pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    vision = transformers.Florence2VisionConfig(**VISION)
    config = transformers.Florence2Config(text_config=text, vision_config=vision, image_token_id=4)
    torch.manual_seed(7)
    model = transformers.Florence2ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # else the random answers hardly depend on the image
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(florence, "gpu_is_free", lambda gb: False)


def test_a_job_writes_the_captions_that_the_classes_give(model, tmp_path):
    import transformers

    for number in range(2):
        photo(tmp_path / f"{number}.png", seed=number, size=(90, 60))
    given = {"engine": "florence", "model": str(model), "task": "short", "trigger": "ohwx"}
    assert options.write(Folder(tmp_path), options.checked(given)).written == 2
    processor = transformers.Florence2Processor.from_pretrained(model)
    plain = transformers.Florence2ForConditionalGeneration.from_pretrained(model).eval()
    for number in range(2):
        image = Image.open(tmp_path / f"{number}.png").convert("RGB")
        inputs = processor(text="<CAPTION>", images=image, return_tensors="pt")
        with torch.inference_mode():
            ids = plain.generate(**inputs, max_new_tokens=64, num_beams=3, do_sample=False)
        text = processor.batch_decode(ids, skip_special_tokens=True)[0].strip()
        assert len(text) > 10
        assert (tmp_path / f"{number}.txt").read_text() == f"ohwx, {text}"


def test_each_length_asks_its_own_question_and_ends_at_its_limit_and_a_gpu_without_room_is_named(model, monkeypatch):
    monkeypatch.setattr(florence, "TASKS", {task: (word, 8) for task, (word, _) in florence.TASKS.items()})
    for task in florence.TASKS:
        caption = florence.load(model, task)(Image.new("RGB", (70, 50), "green"))
        assert caption and len(caption.split()) <= 8
    monkeypatch.setattr(florence, "gpu_is_free", lambda gb: True)
    monkeypatch.setattr("transformers.Florence2ForConditionalGeneration.to", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(RunError, match="too little free memory for this model; end what uses it"):
        florence.load(model, "short")


def test_code_of_a_repository_never_runs(model, tmp_path):
    """microsoft/Florence-2-base has an auto_map, and its code would run with trust_remote_code."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoProcessor": "evil.P"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    florence.load(folder, "short")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"\x08\0\0\0\0\0\0\0damaged!"), ("model.safetensors", None), ("config.json", b"{")],
)
def test_files_that_are_not_florence_are_named(model, tmp_path, name, content):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).unlink()
    if content:
        (folder / name).write_bytes(content)
    with pytest.raises(RunError, match="cannot be loaded as Florence-2"):
        florence.load(folder, "short")
