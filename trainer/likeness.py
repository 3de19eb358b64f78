"""`python -m trainer.likeness`: how alike sample images and training images are, by an image-embedding model on this machine.

The score of a sample is the mean cosine similarity between its embedding and those of the training images, as DINO and CLIP-I
scores are defined (DreamBooth, arXiv:2208.12242, section 4.2). The process computes on the CPU at low priority, because a GPU
that is here trains, and it never downloads anything. Scores are written after every few images, so that a killed process loses
little; images that have a score are not read again.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from guards import checkpoint
from trainer.dataset import DAMAGE, EXTENSIONS

VERSION = 1
MOST_IMAGES = 100  # training images that are compared; of more, evenly chosen ones
SAVE_EVERY = 8  # samples between two writes


def images_below(folder: Path) -> list[Path]:
    """The images of a folder and its subfolders by path, hidden ones not."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        found += [Path(parent, name) for name in sorted(names) if name[0] != "." and name.lower().endswith(EXTENSIONS)]
    return found


def chosen(paths: list[Path]) -> list[Path]:
    """At most MOST_IMAGES of the paths, evenly spaced."""
    if len(paths) <= MOST_IMAGES:
        return paths
    return [paths[i * len(paths) // MOST_IMAGES] for i in range(MOST_IMAGES)]


def fingerprint(model: Path, images: list[Path]) -> str:
    """What the scores depend on besides the samples: the model and the training images."""
    parts = [str(VERSION), str(model)]
    for path in images:
        found = path.stat()
        parts.append(f"{path}\0{found.st_size}\0{found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Embedder:
    """An image-embedding model: CLIP, SigLIP or DINOv2, read from a folder by transformers' own classes."""

    def __init__(self, model: Path):
        import torch
        from transformers import AutoImageProcessor, AutoModel

        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
        self.processor = AutoImageProcessor.from_pretrained(model, local_files_only=True)
        self.model = AutoModel.from_pretrained(model, local_files_only=True, use_safetensors=True).float().eval()

    def __call__(self, path: Path):
        """The embedding of an image with length 1: a float32 vector. Raises OSError or ValueError for a damaged image."""
        import torch
        from PIL import Image, ImageOps

        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
        with torch.no_grad():
            inputs = self.processor(images=picture, return_tensors="pt")
            if hasattr(self.model, "get_image_features"):
                out = self.model.get_image_features(pixel_values=inputs["pixel_values"])
            else:
                out = self.model(**inputs)
        vector = out if isinstance(out, torch.Tensor) else getattr(out, "pooler_output", None)
        if vector is None:
            vector = out.last_hidden_state[:, 0]
        vector = vector[0].flatten().float()
        return vector / vector.norm().clamp_min(1e-12)


def embeddings(embed: Embedder, paths: list[Path]) -> Iterator:
    """The embeddings of the images; a damaged one is reported and left out."""
    from PIL import Image

    for number, path in enumerate(paths, start=1):
        try:
            yield embed(path)
        except (*DAMAGE, Image.DecompressionBombError) as problem:
            print(f"{path} is left out: {problem}", file=sys.stderr, flush=True)
        print(f"training image {number} of {len(paths)}", flush=True)


def own_likeness(vectors) -> float | None:
    """The mean similarity between two different training images; None with fewer than two."""
    count = len(vectors)
    if count < 2:
        return None
    total = float(vectors.sum(0) @ vectors.sum(0)) - count
    return total / (count * (count - 1))


def read(path: Path, key: str) -> dict[str, float]:
    """The scores that an earlier process has written with the same model and training images."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["fingerprint"] == key:
            return {str(name): float(score) for name, score in known["samples"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def main(argv: list[str]) -> int:
    """Compute the scores of all samples. Exit code 0; 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m trainer.likeness", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, in transformers' layout")
    parser.add_argument("--name", required=True, help="the model's name, for people")
    parser.add_argument("--images", type=Path, required=True, help="folder of the training images")
    parser.add_argument("--samples", type=Path, required=True, help="folder of the sample images")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file of the scores")
    args = parser.parse_args(argv)
    if hasattr(os, "nice"):
        os.nice(10)
    every, samples = images_below(args.images), images_below(args.samples)
    images = chosen(every)
    if not images or not samples:
        what = args.samples if images else args.images
        print(f"{what}: there are no images to compare", file=sys.stderr)
        return 1
    key = fingerprint(args.model, images)
    scores = read(args.output, key)
    names = {path.relative_to(args.samples).as_posix(): path for path in samples}
    scores = {name: score for name, score in scores.items() if name in names}
    todo = [name for name in names if name not in scores]

    import torch
    from safetensors import SafetensorError

    try:
        embed = Embedder(args.model)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as problem:
        print(f"{args.model}: the model cannot be read: {problem}", file=sys.stderr)
        return 1
    found = list(embeddings(embed, images))
    if not found:
        print(f"{args.images}: no image can be read", file=sys.stderr)
        return 1
    vectors = torch.stack(found)
    mean, own = vectors.mean(0), own_likeness(vectors)

    def save() -> None:
        values = {"version": VERSION, "model": args.name, "images": len(vectors), "own": own, "fingerprint": key}
        checkpoint.atomic_write(args.output, json.dumps({**values, "samples": scores}).encode())

    save()
    from PIL import Image

    for number, name in enumerate(todo, start=1):
        try:
            scores[name] = float(embed(names[name]) @ mean)
        except (*DAMAGE, Image.DecompressionBombError) as problem:
            print(f"{name} is left out: {problem}", file=sys.stderr, flush=True)
        print(f"sample {number} of {len(todo)}", flush=True)
        if number % SAVE_EVERY == 0:
            save()
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
