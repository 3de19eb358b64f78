"""The model hub, as for sd-scripts. musubi-tuner loads each family's tokenizer where its text encoder is loaded."""

from __future__ import annotations

from sd_scripts_patches import hub
from sd_scripts_patches.patch import Patch

UTIL = "musubi_tuner.utils.huggingface_utils"
TOKENIZERS = (
    ("musubi_tuner.zimage.zimage_utils", "Qwen2Tokenizer", "load_qwen3"),
    ("musubi_tuner.flux_2.flux2_utils", "AutoProcessor", "Mistral3Embedder"),
    ("musubi_tuner.qwen_image.qwen_image_utils", "Qwen2Tokenizer", "load_qwen2_5_vl"),
    ("musubi_tuner.qwen_image.qwen_image_utils", "Qwen2VLProcessor", "load_vl_processor"),
    ("musubi_tuner.wan.modules.tokenizers", "AutoTokenizer", "HuggingfaceTokenizer"),
    ("musubi_tuner.krea2.krea2_encoder", "AutoTokenizer", "load_qwen3_vl_conditioner"),
    ("musubi_tuner.krea2.krea2_encoder", "Qwen2TokenizerFast", "load_qwen3_vl_conditioner"),
    ("musubi_tuner.flux.flux_utils", "CLIPTokenizer", "load_clip_l"),
    ("musubi_tuner.flux.flux_utils", "T5Tokenizer", "load_t5xxl"),
)

PATCH = Patch(
    name="hub",
    why=hub.PATCH.why,
    targets=(*hub.INSTALLED, *hub.tokenizers(TOKENIZERS), *hub.uploads(UTIL)),
    prepare=hub.prepare,
)
