"""Finds and loads the parts of a model in diffusers' layout, from a folder or a hub id.

The part that is trained is read tensor by tensor from its safetensors files instead of with `from_pretrained`: each
tensor is progress for the heartbeat, and a weight that is stored in fewer bits is so as soon as it is read: 24 GB of
bf16 are never in memory. Missing files are reported before anything is read.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from trainer import families, tiny_flux
from trainer.errors import TrainError

PART = re.compile(r"(transformer|unet|vae|scheduler|(text_encoder|tokenizer)(_\d)?)")
# one of these sets of files is required; without it, transformers silently creates a tokenizer without words
VOCABULARY = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",))
TOKENIZER = (".json", ".txt", ".model", ".jinja")  # the ends of its files' names
POINTER = b"version https://git-lfs"
Tick = Callable[[int, int], None]  # done, total
WRONG = (ImportError, OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError)  # of a part


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
    families.of(folder)
    wrong = []
    for part in parts(folder):
        config, stem = files_of(part)
        if not (folder / part / config).is_file():
            wrong.append(f"{part}/{config} is missing")
        elif stem:
            wrong += [f"{part}/{problem}" for problem in weight_problems(folder / part, stem)]
        elif part.startswith("tokenizer") and not any(
            all((folder / part / file).is_file() for file in files) for files in VOCABULARY
        ):
            wrong.append(f"{part}/{' or '.join(' and '.join(files) for files in VOCABULARY)} is missing")
    if wrong:
        raise TrainError(
            f"the model in {folder} is incomplete: {'; '.join(wrong)}; download the complete folder "
            f"(.venv/bin/hf download <id> --local-dir {folder}), or use another --pretrained_model_name_or_path"
        )


def parts(folder: Path) -> dict[str, tuple[str, str]]:
    """The parts of a model that are loaded: folder → (library, class), as its model_index.json names them."""
    named = {part: value for part, value in families.index(folder).items() if PART.fullmatch(part)}
    return {part: (value[0], value[1]) for part, value in named.items() if isinstance(value, list) and value[0]}


def files_of(part: str) -> tuple[str, str | None]:
    """(the configuration, the prefix of the weights) of a part; None without weights."""
    if part.startswith("tokenizer"):
        return "tokenizer_config.json", None
    if part == "scheduler":
        return "scheduler_config.json", None
    return "config.json", "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"


def weight_problems(folder: Path, stem: str) -> list[str]:
    """What is wrong with the weight files of a part, as short sentences."""
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
        names = families.read_json(index).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(names))]
    if (folder / f"{stem}.safetensors").is_file():
        return [folder / f"{stem}.safetensors"]
    raise FileNotFoundError(folder / f"{stem}.safetensors")


def download(name: str, tick: Tick) -> Path:
    """A snapshot of a hub id with the files that are loaded; from the local cache only when HF_HUB_OFFLINE is set.

    Raises: TrainError with the reason. A download that was interrupted continues at the next start.
    """
    from guards.download import cached_repository, snapshot
    from guards.hub import DownloadError

    try:
        folder = snapshot(name, wanted, lambda at: tick(at.done >> 20, at.total >> 20))
    except OSError as problem:
        raise TrainError(f"{name}: {problem}") from problem
    except DownloadError as problem:
        found = cached_repository(name)
        if found is not None and problem.kind in ("offline", "stalled", "server"):
            with contextlib.suppress(TrainError):  # perhaps the hub's library completed it
                check(found)
                return found
        by_hand = f"download it elsewhere (hf download {name}) and use the folder"
        raise TrainError(f"{name}: {problem.or_by_hand(by_hand)}") from problem
    check(folder)
    return folder


def wanted(names: list[str]) -> list[str]:
    """Of a repository's files the ones that are loaded: no other formats, precisions or single files."""
    chosen = [families.INDEX]
    for part in sorted({name.split("/")[0] for name in names if "/" in name and PART.fullmatch(name.split("/")[0])}):
        config, stem = files_of(part)
        inside = [name for name in names if name.startswith(f"{part}/")]
        if stem is None:
            chosen += [name for name in inside if name.endswith(TOKENIZER)]
            continue
        index, weights = f"{part}/{stem}.safetensors.index.json", f"{part}/{stem}.safetensors"
        shard = re.compile(re.escape(f"{part}/{stem}-") + r"\d+-of-\d+\.safetensors")
        chosen.append(f"{part}/{config}")
        chosen += [index, *filter(shard.fullmatch, inside)] if index in inside else [weights]
    return [name for name in chosen if name in names]


def fingerprint(folder: Path, *parts: str) -> str:
    """A short hash of some parts of a model: of each file that is loaded, its size and its first and last 64 KiB.

    Reading 24 GB for the name of a cache would take minutes at each start. Both ends of a safetensors file contain its
    layout and some of its values, which is enough to distinguish two models. Other files come and go: what another
    program downloads into the folder, or a file manager puts there, makes it no other model.
    """
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        for file in sorted(loaded(folder / part)):
            size = file.stat().st_size
            digest.update(f"{part}/{file.name}:{size};".encode())
            with open(file, "rb") as handle:
                digest.update(handle.read(1 << 16))
                if size > 1 << 17:
                    handle.seek(-(1 << 16), os.SEEK_END)
                    digest.update(handle.read())
    return digest.hexdigest()[:16]


def loaded(part: Path) -> list[Path]:
    """The files of a part that are loaded."""
    config, stem = files_of(part.name)
    if stem is None:
        return [file for file in part.iterdir() if file.name.endswith(TOKENIZER) and not file.name.startswith(".")]
    index = part / f"{stem}.safetensors.index.json"
    return [part / config, *([index] if index.is_file() else []), *weight_files(part, stem)]


def t5_tokens(folder: Path, family: families.Family, requested: int | None) -> int:
    """T5 tokens per prompt: `requested`, else the family's usual number, limited by the tokenizer; 0 without a T5."""
    usual = family.t5_tokens(config(folder, family.denoiser))
    if not usual:
        return 0
    if requested:
        return requested
    tokenizer = max(part for part in parts(folder) if part.startswith("tokenizer"))
    return int(min(usual, config(folder, tokenizer, "tokenizer_config.json").get("model_max_length", usual)))


def config(folder: Path, part: str, file: str = "config.json") -> dict:
    """A configuration file of a part. Raises: TrainError."""
    return families.read_json(folder / part / file)


def class_of(folder: Path, part: str):
    """The class of a part. Raises: TrainError for one that diffusers and transformers do not have."""
    library, name = parts(folder)[part]
    module = importlib.import_module(library) if library in ("diffusers", "transformers") else None
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise TrainError(
            f"{folder / families.INDEX}: {part} is a {name} of {library}, which cannot be loaded; use another model"
        )
    return found


def load_denoiser(folder: Path, family: families.Family, dtype, device, kind: str, tick: Tick):
    """The part that is trained, with frozen weights of `dtype`; those of its blocks as `kind` (quantized.KINDS) says.

    They are stored once: a copy stays beside the model (guards/quantized.py). On a CPU, weights that have the right
    type are the file itself, mapped: no second copy of them is in memory, and the next attempt finds them there.

    Raises: TrainError for missing or unknown tensors, a wrong shape, or a damaged file.
    """
    from guards import world
    from guards.quantized import Copy

    part = folder / family.denoiser
    files = weight_files(part, "diffusion_pytorch_model")
    if not kind:
        return read_denoiser(folder, family, files, dtype, device, "", tick)
    copy = Copy(part, files, f"{kind} in {dtype} on {device.type}")
    if copy.path.exists():
        try:
            return read_denoiser(folder, family, [copy.path], dtype, device, kind, tick, is_copy=True)
        except TrainError as problem:
            print(f"the copy of the weights in {kind} cannot be used and is made again: {problem}", flush=True)
            copy.path.unlink()
    try:
        ours = copy if world.rank() == 0 else None
        model = read_denoiser(folder, family, files, dtype, device, kind, tick, ours)
    except BaseException:
        copy.give_up()
        raise
    copy.finish()
    return model


def read_denoiser(folder: Path, family, files: list[Path], dtype, device, kind, tick: Tick, copy=None, is_copy=False):
    """As `load_denoiser`, from these files; each tensor is added to `copy`. is_copy: they are one."""
    import torch
    from accelerate import init_empty_weights
    from safetensors import SafetensorError, safe_open

    from trainer import lora, quantized

    with init_empty_weights():
        model = class_of(folder, family.denoiser).from_config(config(folder, family.denoiser))
    owners = dict(model.named_modules())
    small = set(lora.layers(model, family.blocks["all"])) if kind else set()
    scaled = {f"{name}.{quantized.SCALES}" for name in small if kind in quantized.SCALED}
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    wanted |= dict.fromkeys(scaled if is_copy else ())
    scales: dict[str, torch.Tensor] = {}
    unknown, done = [], 0

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if copy is not None:
            copy.add(name, tensor)
        return tensor

    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):  # "scales" before "weight"
                    if name not in wanted:
                        unknown.append(name)
                        continue
                    tensor, shape = tensors.get_tensor(name), wanted.pop(name)
                    where, _, leaf = name.rpartition(".")
                    stored = where in small and leaf in ("weight", quantized.SCALES)
                    if tensor.shape != shape and not (is_copy and stored):
                        raise TrainError(
                            f"{file}: the shape of {name} is {tuple(tensor.shape)} instead of {tuple(shape)}; "
                            "download the complete model again"
                        )
                    # moved first, so that the GPU casts: a CPU needs half a minute
                    tensor = tensor.to(device)
                    if not stored:
                        parameter = torch.nn.Parameter(keep(name, tensor.to(dtype)), requires_grad=False)
                        setattr(owners[where], leaf, parameter)
                    elif leaf == quantized.SCALES:
                        scales[where] = tensor
                    elif is_copy:
                        quantized.convert(owners[where], tensor, scales.get(where))
                    else:
                        weight, of_rows = quantized.store(tensor, kind)
                        quantized.convert(owners[where], keep(name, weight), of_rows)
                        if of_rows is not None:
                            keep(f"{where}.{quantized.SCALES}", of_rows)
                    done += 1
                    tick(done, done + len(wanted))
        except SafetensorError as problem:
            raise TrainError(f"{file}: damaged or truncated ({problem}); download it again") from problem
    for what, names in (("missing", sorted(wanted)), ("unknown", sorted(unknown))):
        if names:
            raise TrainError(
                f"{folder / family.denoiser}: {len(names)} {what} tensors: {some(names)}; download it again"
            )
    return model.to(device).eval()  # what is in no file, such as tables of frequencies


def some(names: list[str]) -> str:
    """The first five names."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def load_part(folder: Path, part: str, dtype, device):
    """The VAE or a text encoder, frozen, in `dtype` on `device`.

    Raises: TrainError for damaged files and missing tensors, which `from_pretrained` would fill with random numbers.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    Class = class_of(folder, part)
    try:
        of_diffusers = parts(folder)[part][0] == "diffusers"  # transformers would ask whether to run the folder's code
        own = {"torch_dtype": dtype} if of_diffusers else {"dtype": dtype, "trust_remote_code": False}
        settings = {"low_cpu_mem_usage": True, "local_files_only": True, "output_loading_info": True, **own}
        model, info = Class.from_pretrained(folder / part, **settings)
    except (*WRONG, SafetensorError, StrictDataclassError) as problem:
        # still on the CPU: out of GPU memory is raised below
        text = f"{folder / part}: cannot be loaded: {problem}; download it again, or use another model"
        raise TrainError(text) from problem
    absent = sorted(info["missing_keys"])
    if absent:
        raise TrainError(f"{folder / part}: {len(absent)} missing tensors: {some(absent)}; download it again")
    return model.requires_grad_(False).eval().to(device)


def load_tokenizer(folder: Path, part: str):
    """The tokenizer of a part. Raises: TrainError."""
    try:
        Class = class_of(folder, part)
        return Class.from_pretrained(folder / part, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # the tokenizers library raises Exception itself
        raise TrainError(f"{folder / part}: the tokenizer cannot be loaded: {problem}; download it again") from problem


def pipeline(folder: Path, **loaded):
    """The pipeline of a model with these parts, and without the others. `device`: where it computes."""
    import diffusers

    device, index = loaded.pop("device"), families.index(folder)
    Class = getattr(diffusers, index["_class_name"])
    found = type("Pipeline", (Class,), {"_execution_device": device})(**{**dict.fromkeys(parts(folder)), **loaded})
    # such as is_distilled of FLUX.2 klein: the model is not made for classifier-free guidance
    found.register_to_config(**{name: value for name, value in index.items() if isinstance(value, bool)})
    found.set_progress_bar_config(disable=True)
    return found
