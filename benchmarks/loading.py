"""How long the weights of a real-size FLUX take to load, with the page cache warm and cold: what is left of a start without imports.

    python -m benchmarks loading [--gigabytes 1] [--folder DIR] [--json]

The model is random, with the widths of FLUX.1-dev and as many of its blocks as have `--gigabytes` in bf16 (all of them: 24). Each way
is a process of its own, once with the page cache cold (`posix_fadvise`) and once warm. Measured: from the first look at the files
until each weight has been copied once, which stands for the way to the GPU; imports are not part of it. The peak of memory is what
the process itself holds (RssAnon): pages of a mapped file are shared with the page cache, and the next attempt finds them there.

    trainer, bf16            the built-in trainer
    trainer, float8, cast    the same with --fp8_base at its first start, which casts each weight and keeps a copy
    trainer, float8, copy    at every later start: it reads the copy
    load_file                safetensors, as sd-scripts loads
    load_file, cast          the same with --fp8_base, which casts the whole model on the CPU
    read                     sd-scripts with --disable_mmap_load_safetensors: into memory of its own
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs.paths import ROOT

FULL = {"num_layers": 19, "num_single_layers": 38}
WIDTHS = {
    "patch_size": 1,
    "in_channels": 64,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}
SHARD = 5 << 30  # bytes of a file of the model
WAYS = ("trainer, bf16", "trainer, float8, cast", "trainer, float8, copy", "load_file", "load_file, cast", "read")


def make(folder: Path, gigabytes: float) -> dict[str, int]:
    """Write a random FLUX transformer in diffusers' layout; how many blocks of each kind it has."""
    import torch
    from accelerate import init_empty_weights
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from safetensors.torch import save_file

    share = min(1.0, gigabytes / 24)
    blocks = {name: max(1, round(count * share)) for name, count in FULL.items()}
    part = folder / "transformer"
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(WIDTHS | blocks), encoding="utf-8")
    with init_empty_weights():
        shapes = {n: p.shape for n, p in FluxTransformer2DModel.from_config(WIDTHS | blocks).named_parameters()}
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    shards: list[dict[str, Any]] = [{}]
    for name, shape in shapes.items():
        tensor = noise.repeat(-(-shape.numel() // len(noise)))[: shape.numel()].reshape(shape)
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD:
            shards[-1] = {n: _save(part, len(shards), shards[-1], n, save_file) for n in shards[-1]}
            shards.append({})
        shards[-1][name] = tensor
    shards[-1] = {n: _save(part, len(shards), shards[-1], n, save_file) for n in shards[-1]}
    index = {"weight_map": {name: file for shard in shards for name, file in shard.items()}}
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    os.sync()
    return blocks


def _save(part: Path, number: int, shard: dict[str, Any], name: str, save_file: Callable[..., None]) -> str:
    """The file of a tensor; the whole shard is written with its first one."""
    file = f"diffusion_pytorch_model-{number:05d}.safetensors"
    if name == next(iter(shard)):
        save_file(shard, part / file)
    return file


def drop_caches(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def own_bytes() -> int:
    """Memory of this process that no file backs."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
    return int(found[1]) * 1024 if found else 0


class Peak:
    """The most memory of its own that the process had inside the block, more than before."""

    def __enter__(self) -> Peak:
        self.before = self.most = own_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.most = max(self.most, own_bytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, own_bytes())


def load(way: str, folder: Path) -> dict[str, float]:
    """Load in one way: {"open_s", "use_s", "seconds", "cpu_s", "own_bytes"}; `use_s` is the copy of each weight."""
    import torch

    from guards import quantized
    from trainer import imports, models

    imports.heavy()
    quantized.RESERVE = 0
    part = folder / "transformer"
    files = sorted(part.glob("*.safetensors"))
    buffer = torch.empty(256 << 20, dtype=torch.uint8)  # the largest weight has 226 MB
    buffer.zero_()
    began, began_cpu_s = time.monotonic(), time.process_time()
    with Peak() as peak:
        if way.startswith("trainer"):
            model = models.load_transformer(
                folder, torch.bfloat16, torch.device("cpu"), "float8" in way, lambda done, total: None
            )
            tensors = dict(model.named_parameters())
        elif way == "read":
            from safetensors.torch import load as parse

            tensors = {name: tensor for file in files for name, tensor in parse(file.read_bytes()).items()}
        else:
            from safetensors.torch import load_file

            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            if "cast" in way:
                tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
        opened = time.monotonic()
        for tensor in tensors.values():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for at in range(0, len(flat), len(buffer)):
                piece = flat[at : at + len(buffer)]
                buffer[: len(piece)].copy_(piece)
        ended, cpu_s = time.monotonic(), time.process_time() - began_cpu_s
    for thread in threading.enumerate():
        if thread.name == "hangproof-float8":
            thread.join()
    return {
        "open_s": opened - began,
        "use_s": ended - opened,
        "seconds": ended - began,
        "cpu_s": cpu_s,
        "own_bytes": float(peak.most - peak.before),
    }


def measure(folder: Path, way: str, cold: bool, repeats: int) -> dict[str, Any]:
    """The median of `repeats` processes."""
    found = []
    for _ in range(repeats):
        if way == "trainer, float8, cast":
            shutil.rmtree(folder / "transformer" / ".hangproof-cache", ignore_errors=True)
        if cold:
            drop_caches(folder)
        else:
            for path in _needed(folder, way):
                with open(path, "rb", buffering=0) as file:
                    while file.read(1 << 24):
                        pass
        command = [sys.executable, "-m", "benchmarks.loading", "--one", way, "--folder", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
    return {"way": way, "cache": "cold" if cold else "warm", **{key: round(value, 3) for key, value in middle.items()}}


def _needed(folder: Path, way: str) -> list[Path]:
    part = folder / "transformer"
    return sorted((part / ".hangproof-cache" if way == "trainer, float8, copy" else part).glob("*.safetensors"))


def main(argv: list[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights in bf16; FLUX.1-dev has 24")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; default: the temporary files")
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(load(arguments.one, arguments.folder)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="loading-", dir=arguments.folder) as scratch:
        folder = Path(scratch)
        if shutil.disk_usage(folder).free < 1.6e9 * arguments.gigabytes + 1e9:
            print(f"{folder}: {1.6 * arguments.gigabytes + 1:.0f} GB are needed", file=sys.stderr)
            return 1
        blocks = make(folder, arguments.gigabytes)
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        out = sys.stderr if arguments.json else sys.stdout
        about = f"{blocks['num_layers']} double and {blocks['num_single_layers']} single blocks"
        print(f"{size / 1e9:.1f} GB in bf16: {about}", file=out)
        for way in WAYS:
            for cold in (True, False):
                rows.append(measure(folder, way, cold, arguments.repeats))
                row = rows[-1]
                text = f"{way:<24} {row['cache']}  {row['seconds']:7.1f} s   {row['cpu_s']:5.1f} s of processor time   own memory {row['own_bytes'] / 1e9:5.1f} GB"
                print(text, file=out, flush=True)
    if arguments.json:
        print(json.dumps({"bytes": size, **blocks, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
