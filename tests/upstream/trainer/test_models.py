"""Tokenizers of the built-in trainer, against the published ones."""

import shutil
from pathlib import Path

import sentencepiece
import tiny_sd_scripts

from trainer import models


def test_the_tokens_are_those_of_the_real_t5_vocabulary(newest, tmp_path):
    """FLUX.1's tokenizer_2 as it is published (sd-scripts brings its vocabulary), against Google's own library."""
    source = Path(tiny_sd_scripts.checkout()) / "configs" / "t5_old"
    shutil.copytree(source, tmp_path / "tokenizer_2")
    (tmp_path / "model_index.json").write_text('{"tokenizer_2": ["transformers", "T5TokenizerFast"]}')
    reference = sentencepiece.SentencePieceProcessor(model_file=str(source / "spiece.model"))
    tokenizer = models.load_tokenizer(tmp_path, "tokenizer_2")
    for text in ("a photo of ohwx man, standing  in rain", "ünï 🎉 日本", " leading space", ""):
        assert tokenizer(text).input_ids == [*reference.encode(text), 1]
