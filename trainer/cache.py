"""Cache of latents and text-encoder outputs on disk. Each file is named by a hash of all its inputs.

The hash covers the image's or caption's content, its bucket, the model and the precision. So a changed image or caption is
encoded again and an unchanged one is not, and a restart with a complete cache loads neither VAE nor text encoders. Files
are written atomically and read through `guards.npz`, which limits the time of a read and sets a damaged file aside; the
next start encodes it again.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guards import npz
from trainer import models
from trainer.dataset import Image, pixels_and_mask
from trainer.errors import TrainError

VERSION = 1
FOLDER = ".hangproof-cache"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Paths:
    """The cache files of the images by index, and of sample prompts by text."""

    latents: list[Path]
    texts: list[Path]
    prompts: dict[str, Path]


def name_of(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, (VERSION, *parts))).encode()).hexdigest()[:24]


def content(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_for(images: Path, output: Path, log: Log) -> Path:
    """`.hangproof-cache` beside the images, which runs share; in the output folder if the images are read-only."""
    if os.access(images, os.W_OK):
        return images / FOLDER
    log(f"{images} is read-only; the cache is written to {output / FOLDER}")
    return output / FOLDER


def usable(path: Path) -> bool:
    """Whether the file is a complete zip. A truncated file lacks its directory; the contents are checked when read."""
    return path.is_file() and zipfile.is_zipfile(path)


def max_tokens(model: Path, requested: int | None) -> int:
    """T5 tokens per prompt: `requested`, else 512 for dev and 256 for schnell, limited by the tokenizer."""
    if requested:
        return requested
    usual = 512 if models.config(model, "transformer").get("guidance_embeds") else 256
    stated = models.config(model, "tokenizer_2", "tokenizer_config.json").get("model_max_length", usual)
    return int(min(usual, stated))


def plan(
    images: list[Image], prompts: list[str], model: Path, output: Path, args, dtypes: tuple, hb, log: Log
) -> Paths:
    """The path of every cache file. `dtypes`: of the VAE and of the text encoders."""
    folders = {folder: folder_for(folder, output, log) for folder in {image.path.parent for image in images}}
    vae = models.fingerprint(model, "vae")
    text = models.fingerprint(model, "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    how = (text, max_tokens(model, args.t5xxl_max_token_length), args.apply_t5_attn_mask, dtypes[1])
    hb.phase("hash", total=len(images), note="image contents")
    contents: dict[Path, str] = {}
    latents, texts = [], []
    for done, image in enumerate(images, start=1):
        if image.path not in contents:
            contents[image.path] = content(image.path)
        folder = folders[image.path.parent]
        inputs = (vae, dtypes[0], contents[image.path], image.bucket, image.resized, *(["mask"] * image.masked))
        latents.append(folder / f"latents-{name_of(*inputs)}.npz")
        texts.append(folder / f"text-{name_of(*how, image.caption)}.npz")
        hb.item(done)
    return Paths(latents, texts, {p: output / FOLDER / f"text-{name_of(*how, p)}.npz" for p in prompts})


def missing_latents(images: list[Image], paths: Paths) -> list[tuple[Image, Path]]:
    wanted = dict(zip(paths.latents, images, strict=True))
    return [(image, path) for path, image in sorted(wanted.items()) if not usable(path)]


def missing_texts(images: list[Image], paths: Paths) -> list[tuple[str, Path]]:
    wanted = {path: image.caption for path, image in zip(paths.texts, images, strict=True)}
    wanted |= {path: prompt for prompt, path in paths.prompts.items()}
    return [(text, path) for path, text in sorted(wanted.items()) if not usable(path)]


def encode_latents(todo: list[tuple[Image, Path]], model: Path, dtype, device, hb) -> None:
    """Encodes images one by one: the mean of the VAE's distribution, shifted and scaled, float32 [16, h/8, w/8].

    The mask is averaged over each latent, float32 [h/8, w/8], as sd-scripts does (`mode="area"` in apply_masked_loss).
    """
    import torch

    hb.phase("load", note="the VAE")
    vae = models.load_part(model, "vae", dtype, device)
    hb.phase("cache_latents", total=len(todo))
    for done, (image, path) in enumerate(todo, start=1):
        hb.item(done - 1, image.path.name)
        with torch.no_grad():
            colours, mask = pixels_and_mask(image)
            picture = torch.from_numpy(colours.copy()).to(device).permute(2, 0, 1)[None].float() / 127.5 - 1
            mean = vae.encode(picture.to(dtype)).latent_dist.mode().float()
            latent = ((mean - vae.config.shift_factor) * vae.config.scaling_factor)[0].cpu()
        if not torch.isfinite(latent).all():
            raise TrainError(f"{image.path}: the VAE in {dtype} returns values that are not finite; add --no_half_vae")
        masks = {}
        if mask is not None:
            area = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None], latent.shape[-2:], mode="area")
            masks["mask"] = area[0, 0].numpy()
        save(path, latents=latent.numpy(), **masks)
        hb.item(done, image.path.name)


def encode_texts(todo: list[tuple[str, Path]], model: Path, args, dtype, device, hb) -> None:
    """Encodes captions and prompts one by one: T5 states [tokens, width], CLIP's pooled vector, the T5 mask."""
    import torch

    hb.phase("load", note="the text encoders")
    tokenizers = [models.load_tokenizer(model, part) for part in ("tokenizer", "tokenizer_2")]
    clip = models.load_part(model, "text_encoder", dtype, device)
    t5 = models.load_part(model, "text_encoder_2", dtype, device)
    limits = (77, max_tokens(model, args.t5xxl_max_token_length))
    hb.phase("cache_text", total=len(todo))
    for done, (text, path) in enumerate(todo, start=1):
        hb.item(done - 1, text)
        tokens = [
            tokenizer(text, max_length=limit, padding="max_length", truncation=True, return_tensors="pt").to(device)
            for tokenizer, limit in zip(tokenizers, limits, strict=True)
        ]
        mask = tokens[1].attention_mask
        with torch.no_grad():
            pooled = clip(tokens[0].input_ids).pooler_output[0]
            states = t5(tokens[1].input_ids, attention_mask=mask if args.apply_t5_attn_mask else None)[0][0]
        if not (torch.isfinite(pooled).all() and torch.isfinite(states).all()):
            raise TrainError(
                f"caption {text!r}: the text encoders in {dtype} return values that are not finite; use --mixed_precision bf16"
            )
        save(path, t5=to_array(states), clip=to_array(pooled), mask=mask[0].cpu().numpy())
        hb.item(done, text)


def save(path: Path, **arrays) -> None:
    """Writes one cache file. An OSError gets the file's name, which write errors lack."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        npz.save(path, **arrays)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from problem


def to_array(tensor):
    """A numpy array with the same bits; bfloat16 becomes uint16, because numpy has no bfloat16."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array):
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def load_latents(path: Path) -> dict:
    """The cached latents of one image, and its mask where it has one: tensors latents, mask."""
    import torch

    return {key: torch.from_numpy(value) for key, value in npz.load(path).items()}


def load_text(path: Path) -> dict:
    """The cached outputs of one caption: tensors t5, clip, mask."""
    return {key: to_tensor(value) for key, value in npz.load(path, keys=("t5", "clip", "mask")).items()}


class Batches:
    """The dataset of the DataLoader: maps a batch of image indices to stacked tensors, in a worker."""

    def __init__(self, paths: Paths):
        self.latents, self.texts = [list(map(str, files)) for files in (paths.latents, paths.texts)]

    def __getitem__(self, batch: tuple[int, ...]) -> dict:
        import torch

        cached = [load_latents(Path(self.latents[i])) for i in batch]
        latents = [one["latents"] for one in cached]
        texts = [load_text(Path(self.texts[i])) for i in batch]
        masks = {}
        if any("mask" in one for one in cached):  # images without a mask are trained as a whole
            whole = torch.ones(latents[0].shape[-2:])
            masks["loss_mask"] = torch.stack([one.get("mask", whole) for one in cached])
        return {
            "latents": torch.stack(latents),
            **masks,
            **{k: torch.stack([t[k] for t in texts]) for k in ("t5", "clip", "mask")},
        }
