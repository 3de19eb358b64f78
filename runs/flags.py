"""What `--set key=value` may say: a field of the spec, else a flag of the chosen backend's parser, of its type.

Checked when a run is made or rendered, never when it is loaded: an old run must open although the checkout is gone.
"""

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import presets
from runs.files import RunError

if TYPE_CHECKING:
    from runs.spec import RunSpec

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def known_flags(backend: str, family: str) -> dict[str, dict]:
    """The flags of a backend's parser by name; {} when sd-scripts is not installed."""
    from presets import schema
    from runs.paths import ROOT, sd_scripts_dir

    if backend == "diffusers":
        return schema.trainer(ROOT / "trainer" / "arguments.py")
    script = presets.families()[family]["script"]
    return schema.sd_scripts(sd_scripts_dir(), script) if (sd_scripts_dir() / script).is_file() else {}


def check_extra(spec: "RunSpec") -> None:
    """Refuse flags that the chosen backend does not have, or values of the wrong type.

    Raises:
        RunError: one line a fault, with the closest flags there are.
    """
    if not spec.extra:
        return
    family = presets.models()[spec.model]["family"]
    known = known_flags(spec.backend, family)
    if not known:
        paths = {*presets.families()[family]["needs"], "tokenizer_cache_dir"}
        others = sorted(set(spec.extra) - paths)
        if others:
            raise RunError(
                f"cannot check {', '.join(others)}: sd-scripts is not installed; run ./start.sh sd-scripts, "
                "or set SD_SCRIPTS_DIR"
            )
        return
    faults = [fault for flag, value in spec.extra.items() if (fault := _fault(flag, value, known, spec.backend))]
    if faults:
        raise RunError("\n".join(faults))


def _fault(flag: str, value: Any, known: Mapping[str, dict], backend: str) -> str | None:
    if flag not in known:
        from runs.spec import RunSpec

        close = difflib.get_close_matches(flag, [*known, *RunSpec.model_fields], n=3)
        return f"{backend} has no flag {flag!r}" + (f"; did you mean {', '.join(close)}?" if close else "")
    entry = known[flag]
    if entry["type"] == "bool":
        return None if isinstance(value, bool) else f"{flag}: is a switch; say true or false, not {value!r}"
    if isinstance(value, bool):
        return None if value is False else f"{flag}: needs a value of type {entry['type']}"
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not entry["nargs"]:
        return f"{flag}: takes one value, not {value!r}"
    for one in values:
        if entry["choices"] and str(one) not in map(str, entry["choices"]):
            return f"{flag}: {one!r} is none of {', '.join(map(str, entry['choices']))}"
        kind = {"int": int, "float": float}.get(entry["type"])
        if kind:
            try:
                kind(str(one))
            except ValueError:
                return f"{flag}: {one!r} is not of type {entry['type']}"
    return None


def parse_settings(settings: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec from `key=value` texts laid over `given`; what is no field goes into `extra`.

    Values are read by what the field or flag wants; lists are JSON (`["a=1", "b=2"]`) or words separated by spaces.

    Raises:
        RunError: a text has no `=`, or the flag does not exist.
    """
    from runs.spec import ALIASES, DEFAULTS, RunSpec

    out, extra = dict(given), {}
    texts = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key:
            raise RunError(f"--set {setting!r}: write KEY=VALUE, e.g. --set rank=16")
        texts[key] = value
    for key, text in texts.items():
        key = ALIASES.get(key, key)
        if key in RunSpec.model_fields and key != "extra":
            out[key] = _field_value(key, text)
        else:
            extra[key] = text
    if extra:
        model = presets.models()[presets.find_model(out.get("model", DEFAULTS["model"]))]
        known = known_flags(out.get("backend", DEFAULTS["backend"]), model["family"])
        out["extra"] = {key: _flag_value(text, known.get(key)) for key, text in extra.items()}
    return out


def _field_value(key: str, text: str) -> Any:
    if key == "prompts":
        return _list(text, lambda t: [line for line in t.splitlines() if line.strip()])
    if text.strip().lower() in ("none", "") and key in ("max_train_steps", "save_every_n_steps"):
        return None
    return text


def _list(text: str, split) -> list[str]:
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise RunError(f'{text!r} is not a JSON list ({error}); write ["a", "b"]') from error
        return [str(value) for value in values]
    return split(text)


def _flag_value(text: str, entry: dict | None) -> Any:
    """A flag's value as its type wants it; text stays when it does not fit, for check_extra to refuse by name."""
    word = WORDS.get(text.strip().lower())
    if entry is None:
        return text
    if entry["type"] == "bool":
        return text if word is None else word
    if entry["nargs"]:
        return _list(text, str.split)
    if text.strip().lower() == "false" and "false" not in map(str, entry["choices"] or ()):
        return False
    kind = {"int": int, "float": float}.get(entry["type"])
    try:
        return kind(text) if kind else text
    except ValueError:
        return text
