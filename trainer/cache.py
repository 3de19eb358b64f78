"""Cache of latents and text-encoder outputs on disk. Each file is named by a hash of all its inputs.

The hash covers the image's or caption's content, its bucket, the model and the precision. So a changed image or caption
is encoded again and an unchanged one is not, and a restart with a complete cache loads neither VAE nor text encoders.
Files are written atomically and read through `guards.npz`, which limits the time of a read and sets a damaged file
aside; the next start encodes it again.
"""

import contextlib
import hashlib
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guards import npz
from guards.quantized import LEFT_AGE_S
from trainer import models
from trainer.data_order import Batch
from trainer.dataset import Image, pixels_and_mask
from trainer.errors import TrainError
from trainer.families import Family, index

VERSION = 1
FOLDER = ".hangproof-cache"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Paths:
    """The cache files of the images by index, of each one's texts (Image.texts), and of sample prompts by text."""

    latents: list[Path]
    texts: list[list[Path]]
    prompts: dict[str, Path]


def name_of(*parts: object) -> str:
    """24 hexadecimal digits: the hash of all that an encoding depends on."""
    return hashlib.sha256("\0".join(map(str, (VERSION, *parts))).encode()).hexdigest()[:24]


def content(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
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


def plan(
    images: list[Image], prompts: list[str], model: Path, output: Path, args, dtypes: tuple, hb, log: Log
) -> Paths:
    """The path of every cache file. `dtypes`: of the VAE and of the text encoders."""
    folders = {folder: folder_for(folder, output, log) for folder in {image.path.parent for image in images}}
    for left in (left for folder in {*folders.values(), output / FOLDER} for left in folder.glob(".*.tmp")):
        with contextlib.suppress(OSError):  # of a process that was killed while it wrote, or another one is writing it
            if time.time() - left.stat().st_mtime > LEFT_AGE_S:
                left.unlink()
    vae = models.fingerprint(model, "vae")
    text = models.fingerprint(model, *text_parts(model))
    # without a T5, two families may take other layers of one text encoder
    how = (text, args.t5_tokens or index(model)["_class_name"], args.apply_t5_attn_mask, dtypes[1])
    hb.phase("hash", total=len(images), note="image contents")
    contents: dict[Path, str] = {}
    latents, texts = [], []
    for done, image in enumerate(images, start=1):
        if image.path not in contents:
            contents[image.path] = content(image.path)
        folder = folders[image.path.parent]
        inputs = (vae, dtypes[0], contents[image.path], image.bucket, image.resized, *(["mask"] * image.masked))
        inputs += ("16 bits",) * image.deep  # those of older versions are white
        latents.append(folder / f"latents-{name_of(*inputs)}.npz")
        texts.append([folder / f"text-{name_of(*how, text)}.npz" for text in image.texts])
        hb.item(done)
    return Paths(latents, texts, {p: output / FOLDER / f"text-{name_of(*how, p)}.npz" for p in prompts})


def text_parts(model: Path) -> list[str]:
    """The parts that encode texts."""
    return sorted(part for part in models.parts(model) if part.startswith(("text_encoder", "tokenizer")))


def missing_latents(images: list[Image], paths: Paths) -> list[tuple[Image, Path]]:
    """The images that must be encoded, each once, with the path of its cache file."""
    wanted = dict(zip(paths.latents, images, strict=True))
    return [(image, path) for path, image in sorted(wanted.items()) if not usable(path)]


def missing_texts(images: list[Image], paths: Paths) -> list[tuple[str, Path]]:
    """The captions and prompts that must be encoded, each once, with the path of its cache file."""
    pairs = [zip(files, image.texts, strict=True) for files, image in zip(paths.texts, images, strict=True)]
    wanted = {path: text for pair in pairs for path, text in pair}
    wanted |= {path: prompt for prompt, path in paths.prompts.items()}
    return [(text, path) for path, text in sorted(wanted.items()) if not usable(path)]


def encode_latents(todo: list[tuple[Image, Path]], model: Path, family: Family, dtype, device, hb) -> None:
    """Encodes images one by one: the latents of the family, float32 [channels, height, width].

    The mask is averaged over each latent, float32 [height, width], as in sd-scripts (`mode="area"`, apply_masked_loss).
    sizes: Image.told.
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
            latent = family.latents(vae, picture)[0].cpu()
        if not torch.isfinite(latent).all():
            raise TrainError(f"{image.path}: the VAE in {dtype} returns values that are not finite; add --no_half_vae")
        more = {"sizes": torch.tensor(image.told).numpy()}
        if mask is not None:
            area = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None], latent.shape[-2:], mode="area")
            more["mask"] = area[0, 0].numpy()
        save(path, latents=latent.numpy(), **more)
        hb.item(done, image.path.name)


def encode_texts(todo: list[tuple[str, Path]], model: Path, family: Family, args, dtype, device, hb) -> None:
    """Encodes captions and prompts one by one: the tensors of the family."""
    import torch

    hb.phase("load", note="the text encoders")
    found = {
        part: models.load_tokenizer(model, part)
        if part.startswith("tokenizer")
        else models.load_part(model, part, dtype, device)
        for part in text_parts(model)
    }
    tokenizer = found[max(part for part in found if part.startswith("tokenizer"))]
    limit = args.t5_tokens or family.tokens or tokenizer.model_max_length
    if cut := sum(len(tokenizer(text).input_ids) > limit for text, _ in todo):
        print(f"warning: {cut} of {len(todo)} texts are longer than {limit} tokens; the model gets no more", flush=True)
    pipe = models.pipeline(model, device=device, **found)
    hb.phase("cache_text", total=len(todo))
    for done, (text, path) in enumerate(todo, start=1):
        hb.item(done - 1, text)
        with torch.no_grad():
            tensors = family.encode(pipe, text, args)
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise TrainError(
                f"caption {text!r}: in {dtype}, the text encoders return values that are not finite; use bf16"
            )
        save(path, **{key: to_array(tensor) for key, tensor in tensors.items()})
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
    """The inverse of `to_array`."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def load(path: Path) -> dict:
    """The cached tensors of one image or text, by name."""
    return {key: to_tensor(value) for key, value in npz.load(path).items()}


class Batches:
    """The dataset of the DataLoader: maps a batch to stacked tensors, in a worker."""

    def __init__(self, paths: Paths):
        self.latents = list(map(str, paths.latents))
        self.texts = [list(map(str, files)) for files in paths.texts]

    def __getitem__(self, batch: Batch) -> dict:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        images = [load(Path(self.latents[image])) for image, _ in batch]
        texts = [load(Path(self.texts[image][text])) for image, text in batch]
        found = {"latents": torch.stack([one["latents"] for one in images])}
        if any("mask" in one for one in images):  # images without a mask are trained as a whole
            whole = torch.ones(found["latents"].shape[-2:])
            found["loss_mask"] = torch.stack([one.get("mask", whole) for one in images])
        if all("sizes" in one for one in images):  # caches of older versions lack them
            found["sizes"] = torch.stack([one["sizes"] for one in images])
        # texts that are cached without padding have different lengths; their mask is padded with zeros
        return found | {key: pad_sequence([text[key] for text in texts], batch_first=True) for key in texts[0]}
