"""A family of sd-scripts on tiny weights, by its own script: guarded it trains the same numbers as unguarded."""

from pathlib import Path

import patches_helpers as helpers
import resume_helpers
import tiny_families
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
        script = tiny_families.table()[name]["script"]
        command = tiny_sd_scripts.command(*arguments, patched=out == guarded, script=script)
        environment = tiny_families.environment(name, work, **settings)
        helpers.watch(command, environment, tiny_sd_scripts.checkout(), 400, 0)
    phases = resume_helpers.same_training(plain, guarded, tiny_families.STEPS, 2)
    assert set(phases) == {"import", "load", *PHASES, "sample", "save", "end"}
    assert [phase for phase in phases if phase in PHASES] == PHASES
    resume_helpers.same_caches(plain, guarded)
    return guarded
