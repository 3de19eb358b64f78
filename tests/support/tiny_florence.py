"""A Florence-2 model with random weights in a folder, made by transformers' own classes: 150 kB, in the layout of the real one."""

from pathlib import Path

VISION = {"depths": (1, 1, 1, 1), "embed_dim": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "num_groups": (1, 2, 2, 4)}
VISION |= {"window_size": 2, "projection_dim": 16, "max_position_embeddings": 4, "max_temporal_embeddings": 4}
SIDE = 64  # pixels; the four stages divide it by 32
WORDS = "Describe what is shown in the image. What does the image describe? a photo of the cat and dog on mat with paragraph in detail"


def tiny_florence(folder: Path) -> Path:
    """Write the model, its tokenizer and its processor into a folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

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
    config = transformers.Florence2Config(
        text_config=text, vision_config=transformers.Florence2VisionConfig(**VISION), image_token_id=4
    )
    torch.manual_seed(7)
    model = transformers.Florence2ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # else the random answers hardly depend on the image
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
