"""A spec takes over a script that a person edited, and says what a later change of the spec cannot do to it.

The spec gets the settings of the script as far as it has fields or flags for them, because the page, the time estimate
and the monitor's mitigations read the spec: halving the learning rate halves the one that the script has.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import presets
from runs import custom_script, env_file
from runs.custom_script import flags, only
from runs.files import Fault, RunError
from runs.scripts import script
from runs.spec import ALIASES, RESERVED_FLAGS

if TYPE_CHECKING:
    from runs.spec import RunSpec

# Fields that dataset.toml has, so that a flag of the script does not change them.
IN_DATASET = ("repeats", "batch_size", "resolution", "keep_tokens")
# What removing the flag of a field means; other fields keep their value.
REMOVED: dict[str, Any] = {"max_train_steps": None, "sample_every_n_steps": 0, "save_every_n_epochs": 0, "trackers": ""}


def plain(spec: "RunSpec") -> "RunSpec":
    """The spec without the edited script."""
    return spec.changed(edited=None)


def adopt(spec: "RunSpec", text: str, folder: Path, platform: str = sys.platform) -> "RunSpec":
    """The spec of a run that uses an edited script: with the settings of the script, as far as a spec has them.

    Args:
        spec: complete, as it is saved (with its save and sample intervals).

    Raises:
        RunError: Start would refuse the script; one fault of the field "script" for each reason.
    """
    text, secrets = env_file.of_script(text)
    base = env_file.with_values(plain(spec), secrets)
    if found := [
        one
        for one in custom_script.problems(text, script(base, folder, platform=platform), platform)
        if one.level == "error"
    ]:
        raise RunError([Fault("script", f"Line {one.line}: {one.text}. {one.advice}") for one in found])
    settled = with_settings(base, text, folder, platform)
    return settled.changed(edited={"script": text, "generated": script(settled, folder, platform=platform)})


def _change(spec: "RunSpec", flag: str, values: list[str | None] | None, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of the spec for a flag that has other values in the script; None: the script does not have it."""
    field = ALIASES.get(flag, flag)
    if field in IN_DATASET:
        return {}
    if field in type(spec).model_fields:
        return {field: values[0]} if values else {field: REMOVED[field]} if field in REMOVED else {}
    if values is None:
        return {"extra": {**spec.extra, flag: False}}
    value: Any = True if not values else values if known.get("nargs") or len(values) > 1 else values[0]
    return {"extra": {**spec.extra, flag: value}}


def with_settings(spec: "RunSpec", text: str, folder: Path, platform: str) -> "RunSpec":
    """The spec with the flags that the edited script changed; a value that the spec does not take is left out."""
    from runs.flags import known_flags

    before = flags(only(script(spec, folder, platform=platform), platform))
    after = flags(only(text, platform))
    known = known_flags(spec.backend, presets.models()[spec.model]["family"])
    for flag in {**before, **after}:
        values = after.get(flag)
        if values == before.get(flag) or flag in RESERVED_FLAGS or (values is not None and None in values):
            continue
        try:
            spec = spec.changed(**_change(spec, flag, values, known.get(flag, {})))
        except RunError:
            continue
    return spec


def refused_change(before: "RunSpec", after: "RunSpec", folder: Path, platform: str = sys.platform) -> str:
    """Why a mitigation cannot be applied to the edited script, as a sentence; "" where it can, or nothing is edited."""
    if before.edited is None:
        return ""
    edited = before.edited.model_dump()
    already, left = (
        custom_script.merge(edited, one.slug, script(plain(one), folder, platform=platform), platform)[1]
        for one in (before, after)
    )
    new = [one for one in left if one not in already]
    if after.save_dir != before.save_dir:
        new.append("it writes its checkpoints itself")
    return f"The edited script cannot take this change: {'; '.join(new)}" if new else ""
