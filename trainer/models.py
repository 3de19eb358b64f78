"""Finds and loads the parts of a FLUX.1 model in diffusers' layout, from a folder or a hub id.

The transformer is read tensor by tensor from its safetensors files instead of with `from_pretrained`: each tensor is
progress for the heartbeat, and with --fp8_base a weight becomes float8 when it is read, so that 24 GB of bf16 are never in
memory; later starts read the float8 weights from a copy. Missing files are reported before anything is read.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from trainer import tiny_flux
from trainer.errors import TrainError

PARTS = {
    "transformer": ("config.json", "diffusion_pytorch_model"),
    "vae": ("config.json", "diffusion_pytorch_model"),
    "text_encoder": ("config.json", "model"),
    "text_encoder_2": ("config.json", "model"),
    "tokenizer": ("tokenizer_config.json", None),
    "tokenizer_2": ("tokenizer_config.json", None),
    "scheduler": ("scheduler_config.json", None),
}
# one of these sets of files is required; without it, transformers silently creates a tokenizer without words
VOCABULARY = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "tokenizer_2": (("tokenizer.json",), ("spiece.model",)),
}
POINTER = b"version https://git-lfs"
Tick = Callable[[int, int], None]  # done, total


def locate(name: str, tick: Tick) -> Path:
    """The folder of the model: `name` itself, the tiny model (created here), or a snapshot from the hub.

    Raises: TrainError with what is missing and how to get it.
    """
    folder = Path(name)
    if folder.name == tiny_flux.NAME and not folder.exists():
        return tiny_flux.ensure(folder.absolute())
    if folder.is_file():
        raise TrainError(
            f"--pretrained_model_name_or_path {name} is a single file; this trainer reads a folder in diffusers' layout "
            "(model_index.json, transformer/, vae/, …); use such a folder, or the sd-scripts backend"
        )
    if folder.is_dir():
        check(folder)
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise TrainError(
            f"--pretrained_model_name_or_path {name}: the folder does not exist; correct the path, or use a hub id"
        )
    return download(name, tick)


def check(folder: Path) -> None:
    """Raises a TrainError with every missing or unusable file of the model."""
    wrong = []
    for part, (config, stem) in PARTS.items():
        if not (folder / part / config).is_file():
            wrong.append(f"{part}/{config} is missing")
        elif stem:
            wrong += [f"{part}/{problem}" for problem in weight_problems(folder / part, stem)]
        elif part in VOCABULARY and not any(
            all((folder / part / file).is_file() for file in files) for files in VOCABULARY[part]
        ):
            wrong.append(f"{part}/{' or '.join(' and '.join(files) for files in VOCABULARY[part])} is missing")
    if wrong:
        raise TrainError(
            f"the model in {folder} is incomplete: {'; '.join(wrong)}; download the complete folder "
            f"(hf download <id> --local-dir {folder}), or use another --pretrained_model_name_or_path"
        )


def weight_problems(folder: Path, stem: str) -> list[str]:
    try:
        files = weight_files(folder, stem)
    except FileNotFoundError:
        return [f"{stem}.safetensors is missing"]
    out = []
    for file in files:
        if not file.is_file():
            out.append(f"{file.name} is missing")
        elif file.stat().st_size < 1024 and file.read_bytes().startswith(POINTER):
            out.append(f"{file.name} is a git-lfs pointer instead of the file itself (run `git lfs pull`)")
    return out


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of a part, sorted. Raises FileNotFoundError when there is neither a file nor an index."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(names))]
    if (folder / f"{stem}.safetensors").is_file():
        return [folder / f"{stem}.safetensors"]
    raise FileNotFoundError(folder / f"{stem}.safetensors")


def download(name: str, tick: Tick) -> Path:
    """A snapshot of a hub id with the files that are loaded; from the local cache only when HF_HUB_OFFLINE is set.

    Raises: TrainError with the reason. A download that was interrupted continues at the next start.
    """
    from guards import hub_cache
    from guards.hub import DownloadError, Options, Source

    try:
        options = Options(lambda at: tick(at.done >> 20, at.total >> 20), wait=True)
        folder = hub_cache.snapshot(Source(name, ""), wanted, options)
    except (DownloadError, OSError) as problem:
        kind = getattr(problem, "kind", "disk")
        found = hub_cache.cached_repository(Source(name, ""))
        if found is not None and kind in (
            "offline",
            "unreachable",
            "stalled",
            "server",
        ):  # perhaps the hub's library completed it
            try:
                check(found)
                return found
            except TrainError:
                if kind == "offline":
                    raise
        if kind == "offline":
            raise TrainError(
                f"{name}: not in the local cache, and HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, download it "
                f"once (hf download {name}), or use a folder"
            ) from problem
        raise TrainError(f"{name}: {problem}") from problem
    check(folder)
    return folder


def wanted(names: list[str]) -> list[str]:
    """Of a repository's files the ones that are loaded: no other formats, precisions or single files."""
    chosen = ["model_index.json"]
    for part, (config, stem) in PARTS.items():
        inside = [name for name in names if name.startswith(f"{part}/")]
        if stem is None:
            chosen += [name for name in inside if name.endswith((".json", ".txt", ".model"))]
            continue
        index, weights = f"{part}/{stem}.safetensors.index.json", f"{part}/{stem}.safetensors"
        shard = re.compile(re.escape(f"{part}/{stem}-") + r"\d+-of-\d+\.safetensors")
        chosen.append(f"{part}/{config}")
        chosen += [index, *filter(shard.fullmatch, inside)] if index in inside else [weights]
    return [name for name in chosen if name in names]


def fingerprint(folder: Path, *parts: str) -> str:
    """A short hash of some parts of a model: of each file its size and its first and last 64 KiB.

    Reading 24 GB for the name of a cache would take minutes at each start. Both ends of a safetensors file contain its
    layout and some of its values, which is enough to distinguish two models.
    """
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        for file in sorted(p for p in (folder / part).iterdir() if p.is_file()):
            size = file.stat().st_size
            digest.update(f"{part}/{file.name}:{size};".encode())
            with open(file, "rb") as handle:
                digest.update(handle.read(1 << 16))
                if size > 1 << 17:
                    handle.seek(-(1 << 16), os.SEEK_END)
                    digest.update(handle.read())
    return digest.hexdigest()[:16]


def config(folder: Path, part: str, file: str = "config.json") -> dict:
    return read_json(folder / part / file)


def read_json(file: Path) -> dict:
    """A JSON object. Raises: TrainError when the file is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise TrainError(f"{file}: not valid JSON ({problem}); download it again") from problem
    if not isinstance(content, dict):
        raise TrainError(f"{file}: not a JSON object; download it again")
    return content


def load_transformer(folder: Path, dtype, device, fp8: bool, tick: Tick):
    """The FLUX transformer with frozen weights of `dtype`; with `fp8`, the blocks' Linears are float8.

    float8 is cast once: a copy of the weights stays beside the model (guards/quantized.py). On a CPU, weights that have the right
    type are the file itself, mapped: no second copy of them is in memory, and the next attempt finds them there.

    Raises: TrainError for missing or unknown tensors, a wrong shape, or a damaged file.
    """
    from guards.quantized import Copy

    part = folder / "transformer"
    files = weight_files(part, "diffusion_pytorch_model")
    if not fp8:
        return read_transformer(folder, files, dtype, device, False, tick)
    copy = Copy(part, files, f"{dtype} on {device.type}")
    if copy.path.exists():
        try:
            return read_transformer(folder, [copy.path], dtype, device, True, tick)
        except TrainError as problem:
            print(f"the copy of the weights in float8 cannot be used and is made again: {problem}", flush=True)
            copy.path.unlink()
    try:
        model = read_transformer(
            folder, files, dtype, device, True, tick, copy if os.environ.get("RANK", "0") == "0" else None
        )
    except BaseException:
        copy.give_up()
        raise
    copy.finish()
    return model


def read_transformer(folder: Path, files: list[Path], dtype, device, fp8: bool, tick: Tick, copy=None):
    """The transformer from these files; each tensor is added to `copy`. Raises: as `load_transformer`."""
    import torch
    from accelerate import init_empty_weights
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from safetensors import SafetensorError, safe_open

    from trainer.fp8 import Fp8Linear, is_block_linear

    with init_empty_weights():
        model = FluxTransformer2DModel.from_config(config(folder, "transformer"))
    wanted = dict(model.named_parameters()) | dict(model.named_buffers())
    owners = dict(model.named_modules())
    unknown, done = [], 0
    if copy is not None:
        copy.begin(len(wanted))
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    if name not in wanted:
                        unknown.append(name)
                        continue
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != wanted[name].shape:
                        raise TrainError(
                            f"{file}: the shape of {name} is {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}; download the "
                            "complete model again"
                        )
                    where, _, leaf = name.rpartition(".")
                    small = fp8 and leaf == "weight" and is_block_linear(where, owners[where])
                    # moved first, so that the GPU casts: a CPU needs half a minute
                    tensor = tensor.to(device).to(torch.float8_e4m3fn if small else dtype)
                    if copy is not None:
                        copy.add(name, tensor)
                    if small:
                        Fp8Linear.convert(owners[where])
                    setattr(owners[where], leaf, torch.nn.Parameter(tensor, requires_grad=False))
                    del wanted[name]
                    done += 1
                    tick(done, done + len(wanted))
        except SafetensorError as problem:
            raise TrainError(f"{file}: damaged or truncated ({problem}); download it again") from problem
    for what, names in (("missing", sorted(wanted)), ("unknown", sorted(unknown))):
        if names:
            raise TrainError(f"{folder / 'transformer'}: {len(names)} {what} tensors: {some(names)}; download it again")
    return model.eval()


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def load_part(folder: Path, part: str, dtype, device):
    """The VAE or a text encoder, frozen, in `dtype` on `device`.

    Raises: TrainError for damaged files and missing tensors, which `from_pretrained` would fill with random numbers.
    """
    from safetensors import SafetensorError

    if part == "vae":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL as Class
    else:
        import transformers

        Class = transformers.CLIPTextModel if part == "text_encoder" else transformers.T5EncoderModel
    try:
        key = "torch_dtype" if part == "vae" else "dtype"
        settings = {"low_cpu_mem_usage": True, "local_files_only": True, "output_loading_info": True, key: dtype}
        model, info = Class.from_pretrained(folder / part, **settings)
    except SafetensorError as problem:
        raise TrainError(f"{folder / part}: damaged or truncated ({problem}); download it again") from problem
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
    ) as problem:  # still on the CPU: out of GPU memory is raised below
        raise TrainError(f"{folder / part}: cannot be loaded: {problem}; download it again") from problem
    absent = sorted(info["missing_keys"])
    if absent:
        raise TrainError(f"{folder / part}: {len(absent)} missing tensors: {some(absent)}; download it again")
    return model.requires_grad_(False).eval().to(device)


def load_tokenizer(folder: Path, part: str):
    import transformers

    Class = transformers.CLIPTokenizer if part == "tokenizer" else transformers.T5TokenizerFast
    try:
        return Class.from_pretrained(folder / part, local_files_only=True)
    except (OSError, ValueError) as problem:
        raise TrainError(f"{folder / part}: the tokenizer cannot be loaded: {problem}; download it again") from problem
