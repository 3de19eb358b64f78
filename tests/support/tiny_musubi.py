"""kohya's real musubi-tuner on a CPU, with tiny models: no file of the checkout is changed.

A family is a row of data/tiny_musubi.toml; its models are made small, and its encoders replaced, by tiny_musubi_models.py as
their modules are imported. $MUSUBI_DIR is the checkout, $MUSUBI_VENV the environment in which it runs.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import kohya_nursery
import tiny_sd_scripts  # noqa: F401 - it settles which interpreters serve
import tomlkit
import tomllib

from benchmarks import tiny_flux as tiny
from benchmarks.tiny_flux import losses  # noqa: F401 - for the tests
from sd_scripts_patches.install import venv_python

Z_IMAGE = "zimage"
TEXT = {"text_encoder": "tiny"}
TESTS = Path(__file__).resolve().parent
FAMILIES = tomllib.loads(Path(__file__).with_name("data").joinpath("tiny_musubi.toml").read_text(encoding="utf-8"))
SITE = f"""
import importlib
gc.disable()  # imports alone make a third of a start's time out of it
AFTER = {{"musubi_tuner.utils.train_utils": [record_losses]}}
if {str(TESTS)!r} not in sys.path:
    sys.path.append({str(TESTS)!r})

def change(name):
    return lambda module: importlib.import_module("tiny_musubi_models").AFTER[name](module)

for name in {sorted({name for family in FAMILIES.values() for name in family["modules"]})!r}:
    AFTER["musubi_tuner." + name] = [change(name)]
"""
"""The middle of sitecustomize. torch is imported when the first of these modules is."""
STAND_INS = {**tiny.STAND_INS, "av": {"__init__.py": '__version__ = "0.0"\n'}}
FLAGS = """
vae=tiny output_name=tiny network_dim=4 optimizer_type=adamw learning_rate=1e-3 lr_scheduler=cosine mixed_precision=bf16
timestep_sampling=shift discrete_flow_shift=2.0 weighting_scheme=none seed=42 max_data_loader_n_workers=0
"""
"""bf16: samples are drawn in it and fail otherwise."""


def checkout() -> Path:
    return Path(os.environ.get("MUSUBI_DIR", "musubi-tuner")).resolve()


def python() -> Path:
    """Return the interpreter of the environment in which musubi-tuner runs."""
    return venv_python(Path(os.environ.get("MUSUBI_VENV", ".venv-musubi")).absolute())


def installation() -> tiny.Installation:
    return tiny.Installation(checkout(), python())


def why_not() -> str:
    """Return why musubi-tuner cannot be run here, or ""."""
    if not (checkout() / "src/musubi_tuner/training/trainer_base.py").is_file():
        return "no checkout of musubi-tuner: set MUSUBI_DIR"
    return "" if python().is_file() else "no environment of musubi-tuner: set MUSUBI_VENV"


def environment(work: Path, patched: bool = True, **extra: str) -> dict[str, str]:
    """Return the environment variables of a process on the tiny models; `extra` wins.

    patched=False: the launcher is not there to make the checkout's modules importable.
    """
    env = installation().environment(work, **extra)
    more = [str(TESTS), *([] if patched else [str(checkout() / "src")])]
    return {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], *more])}


def command(script: str, *args: str, patched: bool = True) -> list[str]:
    """Return the command line of a script in the checkout."""
    return installation().command(*args, patched=patched, script=script)


def trainer(family: str = Z_IMAGE) -> str:
    return f"{family}_train_network.py"


def caching(config: Path, *more: str, family: str = Z_IMAGE) -> dict[str, list[str]]:
    """Return script → arguments of both caching commands."""
    flags = FAMILIES[family]
    given = {"dataset_config": str(config), "device": "cpu", "num_workers": "1", **flags.get("common", {})}
    common = tiny.command_line(given, *more)
    return {
        f"{family}_cache_latents.py": [*common, "--vae", "tiny"],
        f"{family}_cache_text_encoder_outputs.py": [*common, *tiny.command_line(flags.get("text", TEXT))],
    }


def arguments(work: Path, config: Path, out: Path, *more: str, family=Z_IMAGE, **changed: str | None) -> list[str]:
    """Return arguments of a training script. `changed` replaces or adds flags (None removes one)."""
    flags = FAMILIES[family]
    given: dict[str, str | None] = {
        **dict(word.split("=") for word in FLAGS.split()),
        **{name: str(work / f"{name}.safetensors") for name in flags.get("weights", ["dit"])},
        **flags.get("common", {}),
        **flags.get("text", TEXT),
        **flags.get("train", {}),
        "dataset_config": str(config),
        "network_module": flags["network"],
        "output_dir": str(out),
    }
    return tiny.command_line({**given, **changed}, "--sdpa", *more)


def dataset(folder: Path, images: Path, family: str = Z_IMAGE) -> Path:
    """Write the configuration of a data set whose caches are in FOLDER/cache; return its path."""
    path = folder / "dataset.toml"
    made = {"resolution": [64, 64], "caption_extension": ".txt", "batch_size": 1, "enable_bucket": True}
    made |= {"image_directory": images.as_posix(), "cache_directory": (folder / "cache").as_posix()}
    if FAMILIES[family].get("control"):
        made["control_directory"] = (images.parent / "control").as_posix()
    path.write_text(tomlkit.dumps({"datasets": [made]}), encoding="utf-8")
    return path


@functools.lru_cache(maxsize=8)
def workdir(family: str = Z_IMAGE, images: int = 7) -> Path:
    """Return a folder with weights, images, caches (`cached()` copies them) and site/, made once a session. Read-only.

    The caches are made without the patches.
    """
    work = Path(tempfile.mkdtemp(prefix="tiny-musubi-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    write_site(work)
    models = str(TESTS / "tiny_musubi_models.py")
    tiny.make_files(installation(), work, models, family, str(images), PYTHONPATH=environment(work)["PYTHONPATH"])
    shutil.copytree(work / "images", work / "control", ignore=shutil.ignore_patterns("*.txt"))
    config = dataset(work, work / "images", family=family)
    for script, args in caching(config, family=family).items():
        line = command(script, *args, patched=False)
        done = kohya_nursery.run(line, environment(work, patched=False), checkout(), 300)
        if done.returncode:
            raise RuntimeError(f"{line[1:3]} failed:\n{done.stdout[-3000:]}")
    return work


def cached(work: Path, folder: Path, family: str = Z_IMAGE) -> Path:
    """Copy the caches to FOLDER/cache and return the configuration that uses them."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(work / "cache", folder / "cache")
    return dataset(folder, work / "images", family)


def write_site(work: Path) -> None:
    """Write WORK/site of musubi-tuner."""
    installation().write_site(work, tiny.SHARED + SITE + tiny.FINDER, STAND_INS)
