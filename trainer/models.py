"""Finds and loads the parts of a FLUX.1 model in diffusers' layout; a folder or a hub id, tiny or real, the same way.

The transformer is read tensor by tensor from its safetensors files instead of by `from_pretrained`: each tensor is a
sign of progress for the heartbeat, and with --fp8_base a weight becomes float8 as it is read, so that 24 GB of bf16 never
stand in memory. What is missing is said before anything is read.
"""

import json
import os
import threading
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
# either of these sets of files; without one, transformers makes a tokenizer that knows no word, and says nothing
VOCABULARY = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "tokenizer_2": (("tokenizer.json",), ("spiece.model",)),
}
POINTER = b"version https://git-lfs"
Tick = Callable[[int, int], None]  # done, total


def locate(name: str, tick: Tick) -> Path:
    """The folder of the model: `name` itself, the tiny model made on the spot, or a snapshot from the hub.

    Raises: TrainError saying what is missing and how to get it.
    """
    folder = Path(name)
    if folder.name == tiny_flux.NAME and not folder.exists():
        return tiny_flux.ensure(folder.absolute())
    if folder.is_file():
        raise TrainError(
            f"--pretrained_model_name_or_path {name} is a single file; this trainer reads a folder in diffusers' layout "
            "(model_index.json, transformer/, vae/, …); single files go with the sd-scripts backend"
        )
    if folder.is_dir():
        check(folder)
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise TrainError(f"--pretrained_model_name_or_path {name}: no such folder; fix the path or give a hub id")
    return download(name, tick)


def check(folder: Path) -> None:
    """Raises a TrainError that lists every missing or unusable file of the model."""
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
            f"the model in {folder} is not complete: {'; '.join(wrong)}; download the whole folder "
            f"(hf download <id> --local-dir {folder}) or point --pretrained_model_name_or_path elsewhere"
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
            out.append(f"{file.name} is a git-lfs pointer, not the file itself (git lfs pull)")
    return out


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of one part, in order; FileNotFoundError when there is neither a file nor an index."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(names))]
    if (folder / f"{stem}.safetensors").is_file():
        return [folder / f"{stem}.safetensors"]
    raise FileNotFoundError(folder / f"{stem}.safetensors")


def download(name: str, tick: Tick) -> Path:
    """A snapshot of a hub id, only the parts that are used; from the local cache alone when the hub is set offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["model_index.json", *(f"{part}/*" for part in PARTS)]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=ticking_bar(tick)))
    except GatedRepoError as problem:
        raise TrainError(
            f"{name}: its licence must be accepted first: open https://huggingface.co/{name}, accept, then `hf auth login`"
        ) from problem
    except RepositoryNotFoundError as problem:
        raise TrainError(f"{name}: neither a folder here nor a model on the hub; fix the name") from problem
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as problem:
        offline = "; HF_HUB_OFFLINE is set, so nothing is fetched" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise TrainError(
            f"{name}: not in the local cache and the hub does not answer ({type(problem).__name__}){offline}; "
            f"fetch it once (hf download {name}) or give a folder"
        ) from problem
    check(folder)
    return folder


def ticking_bar(tick: Tick) -> type:
    """A progress bar that also beats: files are fetched by several threads, and an hour of silence looks like a hang."""
    from tqdm.auto import tqdm

    lock, seen = threading.Lock(), [0]

    class Ticking(tqdm):
        def update(self, n=1):
            with lock:
                seen[0] += int(n or 0)
                tick(seen[0], 0)
            return super().update(n)

    return Ticking


def fingerprint(folder: Path, *parts: str) -> str:
    """A short hash of some parts of a model: their small files, and size, head and tail of each weight file.

    Reading 24 GB to name a cache would cost minutes at each start; the ends of a safetensors file hold its whole layout
    and some of its values, which is enough to tell two models apart.
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
    """Raises: TrainError where the file is not a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise TrainError(f"{file}: not valid JSON ({problem}); download it again") from problem
    if not isinstance(content, dict):
        raise TrainError(f"{file}: not a JSON object; download it again")
    return content


def load_transformer(folder: Path, dtype, device, fp8: bool, tick: Tick):
    """The FLUX transformer with frozen weights of `dtype`; float8 in the blocks' Linears with `fp8`.

    Raises: TrainError naming tensors that are missing, superfluous or of another shape, or a file that is damaged.
    """
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
    for file in weight_files(folder / "transformer", "diffusion_pytorch_model"):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    if name not in wanted:
                        unknown.append(name)
                        continue
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != wanted[name].shape:
                        raise TrainError(f"{file}: {name} is {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}")
                    where, _, leaf = name.rpartition(".")
                    small = fp8 and leaf == "weight" and is_block_linear(where, owners[where])
                    # moved first, so that a GPU does the cast: a CPU needs half a minute for it
                    tensor = tensor.to(device).to(torch.float8_e4m3fn if small else dtype, copy=True)
                    if small:
                        Fp8Linear.adopt(owners[where])
                    setattr(owners[where], leaf, torch.nn.Parameter(tensor, requires_grad=False))
                    del wanted[name]
                    done += 1
                    tick(done, done + len(wanted))
        except SafetensorError as problem:
            raise TrainError(f"{file}: damaged or cut short ({problem}); download it again") from problem
    for what, names in (("missing", sorted(wanted)), ("unknown", sorted(unknown))):
        if names:
            raise TrainError(f"{folder / 'transformer'}: {len(names)} {what} tensors: {some(names)}")
    return model.eval()


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def load_part(folder: Path, part: str, dtype, device):
    """The VAE or a text encoder, frozen, in `dtype` on `device`.

    Raises: TrainError on damage and on missing tensors, which `from_pretrained` would fill with random numbers.
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
        raise TrainError(f"{folder / part}: damaged or cut short ({problem}); download it again") from problem
    except (OSError, ValueError, TypeError, RuntimeError) as problem:  # on the CPU still: a full GPU raises below
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
        raise TrainError(f"{folder / part}: the tokenizer cannot be loaded: {problem}") from problem
