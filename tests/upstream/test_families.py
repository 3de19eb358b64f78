"""Every model family of kohya's trainers, tiny weights, CPU, its own script: guarded it trains the same numbers as unguarded.

Kills and resumes of each family are a campaign (tests/campaigns/test_families_*.py, test_epoch_ends.py).
"""

from pathlib import Path

import musubi_helpers
import numpy
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_families
import tiny_musubi
import tiny_sd_scripts

from guards import heartbeat
from sd_scripts_patches import compatibility, registry

PHASES = ["cache_latents", "cache_text", "hash", "first_step", "step"]


def settings(out: Path) -> dict[str, str]:
    """The variables of a run whose losses, metrics, beats and phases are kept in `out`."""
    return {
        "TINY_LOSSES": str(out / "losses"),
        "HANGPROOF_RUN": str(out),
        "HANGPROOF_HEARTBEAT": str(out / "hb"),
        "HANGPROOF_INJECT": "patches_injectors:phases",
        "PHASES_FILE": str(out / "phases"),
    }


def phases(out: Path) -> list[str]:
    """The phases of a run in the order in which it first reached them."""
    return list(dict.fromkeys((out / "phases").read_text().split()))


@pytest.mark.parametrize("name", list(tiny_families.FAMILIES))
def test_a_family_of_sd_scripts_trains_the_same_and_is_followed(sd_scripts, name, tmp_path):
    work = tiny_families.workdir(name)
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    for out in (plain, guarded):
        tiny_sd_scripts.copy_of(work, out)
        arguments = tiny_families.arguments(name, work, out / "images", out / "made")
        command = tiny_families.command(name, arguments, out == guarded)
        result = helpers.watch(command, tiny_families.environment(name, work, **settings(out)), sd_scripts, 400)
        assert result.code == 0, result.log[-3000:]
    losses = tiny_sd_scripts.losses(plain / "losses")
    assert len(losses) == tiny_families.STEPS and len({loss for _, _, loss in losses}) == tiny_families.STEPS
    assert tiny_sd_scripts.losses(guarded / "losses") == losses
    loras = [resume_helpers.tensors(out / "made/tiny.safetensors") for out in (plain, guarded)]
    assert len(loras[0]) > 10 and loras[0] == loras[1]
    caches = sorted(path.relative_to(plain) for path in plain.rglob("*.npz"))
    assert caches == sorted(path.relative_to(guarded) for path in guarded.rglob("*.npz"))
    for cache in caches:
        one, other = numpy.load(plain / cache), numpy.load(guarded / cache)
        assert one.files == other.files and all(numpy.array_equal(one[k], other[k]) for k in one.files), cache
    pictures = [resume_helpers.samples(out) for out in (plain, guarded)]
    assert sorted(pictures[0]) == ["tiny_000005_00", "tiny_000010_00"] and pictures[0] == pictures[1]
    (beat,) = heartbeat.read_all(guarded / "hb")
    assert (beat.outcome, beat.step, beat.planned, beat.count) == ("done", *[tiny_families.STEPS] * 3)
    assert len(resume_helpers.learning_rates(guarded)) == tiny_families.STEPS
    assert set(phases(guarded)) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in phases(guarded) if phase in PHASES] == PHASES


@pytest.mark.parametrize("family", [name for name in tiny_musubi.FAMILIES if name != tiny_musubi.Z_IMAGE])
def test_a_family_of_musubi_tuner_trains_the_same_and_is_followed(musubi, family, tmp_path):
    """Z-Image is in test_musubi.py. Its caches are made without the guards; one command makes a part of them with the guards."""
    work = tiny_musubi.workdir(family)
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    more = ["--max_train_epochs", "2", "--save_state", "--sample_every_n_epochs", "1"]
    more += ["--sample_prompts", str(work / "prompts.txt")]
    for folder in (plain, guarded):
        tiny_musubi.cached(work, folder, family=family)
    for script in tiny_musubi.caching(guarded / "dataset.toml", family=family):
        kind = "*_te.safetensors" if "text" in script else "*[0-9]_*x*_*.safetensors"
        next((guarded / "cache").glob(kind)).unlink()
        made = musubi_helpers.cache(guarded, script, "--skip_existing", family=family)
        assert made.code == 0, made.log[-3000:]
    found = [
        {path.name: resume_helpers.tensors(path) for path in (folder / "cache").iterdir()}
        for folder in (plain, guarded)
    ]
    assert found[0] == found[1]
    for folder in (plain, guarded):
        result = musubi_helpers.train(folder, *more, family=family, patched=folder == guarded, env=settings(folder))
        assert result.code == 0 and "skipped" not in result.log, result.log[-3000:]
    losses = tiny_musubi.losses(plain / "losses")
    assert len(losses) == 14 and len({loss for _, _, loss in losses}) > 10
    assert tiny_musubi.losses(guarded / "losses") == losses
    assert resume_helpers.names(plain) == resume_helpers.names(guarded)
    loras = [resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, guarded)]
    assert len(loras[0]) >= 6 and loras[0] == loras[1]
    pictures = [resume_helpers.samples(folder) for folder in (plain, guarded)]
    assert len(pictures[0]) == 2 and pictures[0] == pictures[1]
    (beat,) = heartbeat.read_all(guarded / "hb")
    assert (beat.outcome, beat.step) == ("done", 14) and {"step", "sample", "save"} <= set(phases(guarded))


def test_check_finds_every_family_guarded(sd_scripts):
    for name in tiny_families.FAMILIES:
        arguments = tiny_families.arguments(name, Path("work"), Path("work/images"), Path("out"))
        found = compatibility.refusal(registry.patches(), sd_scripts, arguments, strict=True)
        assert found == ("", []), name
