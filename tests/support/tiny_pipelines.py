"""A tiny random model of each family of the built-in trainer, in diffusers' layout: the real classes, in a second.

Their sizes are in data/tiny_pipelines.toml. FLUX.1's is trainer/tiny_flux.py, which also has the tokenizers.
"""

import json
from pathlib import Path

import pytest
import tomllib

from trainer import imports, tiny_flux

torch = pytest.importorskip("torch")
imports.heavy()
diffusers, transformers = pytest.importorskip("diffusers"), pytest.importorskip("transformers")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIPELINES = tomllib.loads(Path(__file__).with_name("data").joinpath("tiny_pipelines.toml").read_text(encoding="utf-8"))


def write_qwen_tokenizer(folder: Path) -> None:
    """Every byte is a token, and the marks of a chat are one each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(tiny_flux.byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    named = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    made = transformers.Qwen2TokenizerFast(tokenizer_object=tokenizer, **named, model_max_length=2048)
    made.chat_template = CHAT
    made.save_pretrained(folder)


TOKENIZERS = {"clip": tiny_flux.write_clip_tokenizer, "t5": tiny_flux.write_t5_tokenizer, "qwen": write_qwen_tokenizer}


def part_of(row):
    """A part that is no tokenizer, with random weights."""
    values = {**vars(tiny_flux).get(row.get("like", ""), {}), **row}
    values = {key: None if value == "none" else value for key, value in values.items() if key not in ("class", "like")}
    if kind := getattr(diffusers, row["class"], None):
        return kind(**values)
    kind = getattr(transformers, row["class"])
    return kind(kind.config_class(**values))


def make(pipeline: str, folder: Path) -> Path:
    """Write the tiny model of a pipeline to `folder`."""
    index: dict = {"_class_name": pipeline}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows = PIPELINES[pipeline].items()
        for part, made in [(name, TOKENIZERS[row] if isinstance(row, str) else part_of(row)) for name, row in rows]:
            if not hasattr(made, "save_pretrained"):
                made(folder / part)
                named = json.loads((folder / part / "tokenizer_config.json").read_text())["tokenizer_class"]
                index[part] = ["transformers", {"TokenizersBackend": "T5TokenizerFast"}.get(named, named)]
            else:
                for parameter in made.eval().parameters() if hasattr(made, "eval") else ():
                    if not parameter.any():  # some layers of new models are zero: their output depends on nothing
                        torch.nn.init.normal_(parameter, std=0.02)
                made.save_pretrained(folder / part)
                index[part] = [type(made).__module__.split(".")[0], type(made).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
