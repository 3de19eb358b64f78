"""`python -m launch bundle RUN`: a run as one ZIP that trains wherever there is Python, also without a network.

It holds the spec, the data set, the packages that train and supervise (not the page), `train.sh` and `train.bat`.
Nothing in it depends on the folder in which it is unpacked: `train.sh` writes the run's script for the place where it
is, then starts the monitor. `python3 -m zipfile -e` unpacks it; one from somebody else is a program of theirs, as any
script is.
"""

import argparse
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import presets
import runs
from guards.checkpoint import files_below, writing_file
from launch import common, travel
from launch.common import LaunchError
from runs import job as jobs
from runs.files import explained
from runs.paths import ROOT, datasets_dir, models_dir, outputs_dir
from runs.spec import RunSpec, dumps

PACKAGES = ("guards", "launch", "monitor", "presets", "runs")
TRAINERS = {"diffusers": ("trainer",)}  # of the others: sd_scripts_patches
SUFFIXES = (".py", ".toml", ".sh", ".bat", ".sbatch", ".md")
CONTROL = "control/{}"  # control images, below the bundle's folder
PAGE_ONLY = ("gradio", "markdown-it-py", "pillow-heif", "apprise")  # pins of requirements.txt that no training needs
PACKED = (".png", ".jpg", ".jpeg", ".webp", ".safetensors", ".whl")  # a ZIP does not make them smaller
# What must be importable: by the monitor, and by the built-in trainer.
MODULES = ("pydantic", "psutil", "slugify", "tomlkit", "jinja2", "rich", "numpy", "PIL")
TRAINING_MODULES = ("torch", "accelerate", "diffusers", "peft", "safetensors", "transformers")


def entries(spec: RunSpec, wheels: Path | None, models: bool) -> Iterator[tuple[str, bytes | Path]]:
    """The files of the bundle: (name below its folder, contents or path).

    Raises LaunchError: the run has no images, or a folder that was named or a file of the model does not exist.
    """
    yield "train.sh", text(spec, "bundle.sh").encode()
    yield "train.bat", text(spec, "bundle.bat").replace("\n", "\r\n").encode()
    yield "README.txt", text(spec, "bundle.txt").encode()
    yield "requirements.txt", requirements().encode()
    for name in ("setup.sh", "start.sh", "hangproof.py", "LICENSE"):  # start.sh installs kohya's trainers
        yield name, ROOT / name
    for package in (*PACKAGES, *TRAINERS.get(spec.backend, ("sd_scripts_patches",))):
        for path in files_below(ROOT / package, hidden=False):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path
    if (own_models := presets.data_root() / "models.toml").is_file():
        yield "models.toml", own_models
    carried = portable(spec)
    yield f"outputs/{spec.slug}/run.toml", dumps(carried).encode()
    job = portable_job(spec, dumps(carried).encode())
    yield f"outputs/{spec.slug}/job.json", jobs.dumps(job).encode("utf-8", "surrogateescape")
    folders = [(datasets_dir() / spec.slug, f"datasets/{spec.slug}"), *([(wheels, "wheels")] if wheels else [])]
    if spec.control_dir:
        folders.append((Path(spec.control_dir).expanduser().absolute(), CONTROL.format(spec.slug)))
    for folder, name in folders:
        found = [path for path in files_below(folder, hidden=False) if path.is_file()]  # a pipe would never end
        if not found:
            raise LaunchError(f"{folder} does not exist or is empty; the bundle needs it")
        for path in found:
            below = path.relative_to(folder).as_posix().encode("utf-8", "xmlcharrefreplace").decode()  # as a ZIP needs
            yield f"{name}/{below}", path
    for name in sorted(set(presets.models()[spec.model]["files"].values())) if models else ():
        for part in presets.tables.shards(name):
            path = models_dir() / part
            if not path.is_file():
                raise LaunchError(f"{path} is missing; run `python -m runs fetch-model {spec.model}`, or omit --models")
            yield f"models/{part}", path


def portable(spec: RunSpec) -> RunSpec:
    """The spec without the folders of this machine. A relative folder is one of the bundle, where the monitor runs."""
    store = "" if travel.own_folder(spec.store) else spec.store
    return spec.changed(save_dir="", store=store, control_dir=CONTROL.format(spec.slug) if spec.control_dir else "")


def portable_job(spec: RunSpec, run_toml: bytes) -> jobs.Job:
    """The run's job with the bundle's folder instead of this machine's; `train.sh` writes it again for where it is."""
    job = runs.pinned(outputs_dir() / spec.slug)
    control = str(presets.data_root() / CONTROL.format(spec.slug)) if spec.control_dir else ""
    job = jobs.respecified(job, portable(job.run_spec()).changed(control_dir=control), run_toml)
    here = {"run": f"./outputs/{spec.slug}", "data": f"./datasets/{spec.slug}", "models": "./models", "root": "."}
    return jobs.moved(job, here)


def text(spec: RunSpec, template: str) -> str:
    """The text of the bundle's train.sh, train.bat or README.txt."""
    built_in, secrets = spec.backend in TRAINERS, ", ".join(spec.secrets)
    sections = ["builtin" if built_in else "trainer", *["secrets"] * bool(secrets)]
    modules = ", ".join((*MODULES, *(TRAINING_MODULES if built_in else ())))
    return common.fill(template, *sections, slug=spec.slug, modules=modules, trainer=spec.backend, secrets=secrets)


def requirements() -> str:
    """requirements.txt without what only the page needs."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return "".join(f"{line}\n" for line in lines if re.split(r"[=\[ ]", line)[0].lower() not in PAGE_ONLY)


def write(path: Path, top: str, files: list[tuple[str, bytes | Path]]) -> None:
    """Write the ZIP, completely or not at all. Programs stay executable where unzip keeps that."""
    with writing_file(path) as temporary, zipfile.ZipFile(temporary, "w", strict_timestamps=False) as archive:
        for name, source in files:
            kind = zipfile.ZIP_STORED if Path(name).suffix.lower() in PACKED else zipfile.ZIP_DEFLATED
            if isinstance(source, bytes):
                info = zipfile.ZipInfo(f"{top}/{name}", time.localtime()[:6])
                info.external_attr = (0o100755 if name == "train.sh" else 0o100644) << 16
                archive.writestr(info, source, kind)
            else:
                archive.write(source, f"{top}/{name}", kind)


OPTIONS = (
    common.RUN,
    ("-o --output FILE", "", "the file (default: RUN.zip in this folder)"),
    ("--wheels FOLDER", "", "add wheels (pip download -r requirements.txt -d FOLDER), for a machine without a network"),
    ("--models", False, "add the files of the base model, for kohya's trainers (large)"),
)


def run(args: argparse.Namespace) -> int:
    """Write the ZIP. Raises LaunchError, RunError: something that belongs into it is missing; it cannot be written."""
    spec = runs.load(runs.run_folder(args.run))
    path = Path(args.output or f"{spec.slug}.zip").absolute()
    with explained(f"write {path}"):
        files = list(entries(spec, Path(args.wheels) if args.wheels else None, args.models))
        write(path, spec.slug, files)
    size = path.stat().st_size
    there = f"There: python3 -m zipfile -e {path.name} . && bash {spec.slug}/train.sh"
    said = f"{path}: {len(files)} files, {size / 1e6:.1f} MB. {there}"
    return common.report(args, said, {"file": str(path), "files": len(files), "bytes": size})
