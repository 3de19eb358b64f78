"""The scripts that are rendered run unchanged on the real sd-scripts, on toy weights, through the guarded launcher."""

from functools import partial
from pathlib import Path

import pytest
import tiny_sd_scripts
from patches_helpers import ahead, asks
from runs_helpers import pictures, run_script, spec

import runs

TIERS = ("12G", "16G", "20G")


def made(tier: str, work: Path, pictures_in: Path) -> Path:
    """A run of that tier, rendered; its folder."""
    paths = {flag: str(work / f"{name}.safetensors") for flag, name in (
        ("pretrained_model_name_or_path", "flux"), ("clip_l", "clip_l"), ("t5xxl", "t5xxl"), ("ae", "ae"))}  # fmt: skip
    wanted = spec(
        name=f"tiny it's {tier}", backend="sd-scripts", tier=tier, resolution=64, max_train_steps=4, save_every_n_steps=2,
        prompts=["a thing"], sample_every_n_steps=4, sample_steps=1,
        extra={**paths, "tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32},
    )  # fmt: skip
    assert runs.problems(wanted)[-1].message.startswith("no images"), "files, launcher and checkout are all there"
    folder = runs.create(wanted, pictures_in)
    assert runs.problems(runs.load(folder)) == []
    return folder


@pytest.fixture(scope="module")
def started(request, newest, tmp_path_factory):
    """(folder, Future of its `bash train.sh`) by tier, side by side in one data root."""
    base = tmp_path_factory.mktemp("rendered")
    work = tiny_sd_scripts.workdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANGPROOF_DATA", str(base / "data"))
        (base / "data").mkdir()
        folders = {tier: made(tier, work, pictures(base / "in", 2)) for tier in TIERS}
        environment = tiny_sd_scripts.environment(work, HANGPROOF_DATA=str(base / "data"), TIMEOUT_S="400")
        jobs = {t: partial(run_script, folders[t] / "train.sh", None, **environment) for t in TIERS}
        with ahead(request, "rendered", jobs) as futures:
            yield folders, futures


@pytest.fixture
def rendered(request, started):
    """(tier, folder, how its script ended)"""
    folders, futures = started
    return request.param, folders[request.param], futures[request.param].result()


@asks("rendered", "12G")
def test_a_rendered_script_trains(rendered):
    """The other tiers are rendered by the page and run there (tests/campaigns/page/test_sd_scripts.py)."""
    trained(*rendered)


def trained(tier, folder, done):
    slug = folder.name
    log = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, log[-4000:]
    assert {p.name for p in folder.glob("*.safetensors")} >= {f"{slug}.safetensors", f"{slug}-step00000002.safetensors"}
    assert (folder / f"{slug}-step00000002-state").is_dir() and (folder / f"{slug}-state").is_dir()
    assert len(list((folder / "sample").glob("*.png"))) == 1
    assert "Block swap enabled" not in log and ("split" in log.lower() or tier != "12G")
    images = runs.images_in(folder.parent.parent / "datasets" / slug)
    assert len(images) == 2 and all(Path(p).with_suffix(".txt").is_file() for p in images)
