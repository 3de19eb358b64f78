"""A family of kohya's trainers on tiny weights, by its own script: guarded it trains the same numbers as unguarded."""

from pathlib import Path

import musubi_helpers
import patches_helpers as helpers
import resume_helpers
import tiny_families
import tiny_musubi
import tiny_sd_scripts

PHASES = ["cache_latents", "cache_text", "hash", "first_step", "step"]


def sd_scripts(name: str, folder: Path) -> Path:
    """Train a family of sd-scripts without and with the patches, and compare; the folder of the guarded run."""
    work = tiny_families.workdir(name)
    plain, guarded = folder / "plain", folder / "guarded"
    for out in (plain, guarded):
        tiny_sd_scripts.copy_of(work, out)
        arguments = tiny_families.arguments(name, work, out / "images", out / "made")
        settings = {"TINY_LOSSES": str(out / "losses"), "HANGPROOF_RUN": str(out), **resume_helpers.followed(out)}
        command = tiny_families.command(name, arguments, out == guarded)
        environment = tiny_families.environment(name, work, **settings)
        result = helpers.watch(command, environment, tiny_sd_scripts.checkout(), 400)
        assert result.code == 0, result.log[-3000:]
    phases = resume_helpers.same_training(plain, guarded, tiny_families.STEPS, 2)
    assert set(phases) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in phases if phase in PHASES] == PHASES
    resume_helpers.same_caches(plain, guarded)
    return guarded


def musubi(family: str, folder: Path) -> None:
    """The same for musubi-tuner, with caches that are made without the guards."""
    work = tiny_musubi.workdir(family)
    plain, guarded = folder / "plain", folder / "guarded"
    more = ["--max_train_epochs", "2", "--save_state", "--sample_every_n_epochs", "1"]
    more += ["--sample_prompts", str(work / "prompts.txt")]
    for out in (plain, guarded):
        tiny_musubi.cached(work, out, family=family)
        env = resume_helpers.followed(out)
        result = musubi_helpers.train(out, *more, family=family, patched=out == guarded, env=env)
        assert result.code == 0 and "skipped" not in result.log, result.log[-3000:]
    assert {"step", "sample", "save"} <= set(resume_helpers.same_training(plain, guarded, 14, 2))
