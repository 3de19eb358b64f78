"""Every model family of kohya's trainers, tiny weights, CPU, its own script: guarded it trains the same numbers as unguarded.

Kills and resumes of each family are a campaign (tests/campaigns/test_epoch_ends.py).
"""

from pathlib import Path

import musubi_helpers
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_families
import tiny_musubi
import tiny_sd_scripts

from sd_scripts_patches import compatibility, registry

PHASES = ["cache_latents", "cache_text", "hash", "first_step", "step"]


@pytest.mark.parametrize("name", list(tiny_families.FAMILIES))
def test_a_family_of_sd_scripts_trains_the_same_and_is_followed(newest, name, tmp_path):
    work = tiny_families.workdir(name)
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    for out in (plain, guarded):
        tiny_sd_scripts.copy_of(work, out)
        arguments = tiny_families.arguments(name, work, out / "images", out / "made")
        settings = {"TINY_LOSSES": str(out / "losses"), "HANGPROOF_RUN": str(out), **resume_helpers.followed(out)}
        command = tiny_families.command(name, arguments, out == guarded)
        result = helpers.watch(command, tiny_families.environment(name, work, **settings), newest, 400)
        assert result.code == 0, result.log[-3000:]
    phases = resume_helpers.same_training(plain, guarded, tiny_families.STEPS, 2)
    assert set(phases) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in phases if phase in PHASES] == PHASES
    resume_helpers.same_caches(plain, guarded)


@pytest.mark.parametrize("family", [name for name in tiny_musubi.FAMILIES if name != tiny_musubi.Z_IMAGE])
def test_a_family_of_musubi_tuner_trains_the_same_and_is_followed(musubi, family, tmp_path):
    """Z-Image is in test_musubi.py. Its caches are made without the guards; with them: tests/campaigns/test_runs_families.py."""
    work = tiny_musubi.workdir(family)
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    more = ["--max_train_epochs", "2", "--save_state", "--sample_every_n_epochs", "1"]
    more += ["--sample_prompts", str(work / "prompts.txt")]
    for folder in (plain, guarded):
        tiny_musubi.cached(work, folder, family=family)
        env = resume_helpers.followed(folder)
        result = musubi_helpers.train(folder, *more, family=family, patched=folder == guarded, env=env)
        assert result.code == 0 and "skipped" not in result.log, result.log[-3000:]
    assert {"step", "sample", "save"} <= set(resume_helpers.same_training(plain, guarded, 14, 2))


def test_check_finds_every_family_guarded(sd_scripts):
    for name in tiny_families.FAMILIES:
        arguments = tiny_families.arguments(name, Path("work"), Path("work/images"), Path("out"))
        found = compatibility.refusal(registry.patches(), sd_scripts, arguments, strict=True)
        assert found == ("", []), name
