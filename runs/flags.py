"""Checks `--set key=value`: a field of the spec, or a flag of the backend's trainer with a valid value.

The trainer's own parser decides. The built-in one is imported, and called with the complete arguments of the run. Those
of kohya's trainers need torch, so only the functions that fill it are run (presets/schema.py), and presets/sanity.toml
has the choices that the code checks only after the models are loaded. Every flag of every command that a script will
hold is checked, because a checkout of another version can lack one that the tables name. That happens when a run is
created or rendered, but not when it is loaded: an old run must load without the checkout.
"""

import ast
import difflib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import presets
from guards.reading import commit
from runs.files import Fault, RunError
from runs.paths import CHECKOUTS, START, outputs_dir

if TYPE_CHECKING:
    from runs.spec import RunSpec

KINDS = {"int": "a whole number", "float": "a number", "str": "text"}
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def known_flags(backend: str, family: str, script: str = "") -> dict[str, dict]:
    """The flags of a script of a family by name; {} when its trainer is not installed.

    Args:
        script: a script of the family's table; "" for the one that trains.
    """
    from presets import schema

    if backend not in CHECKOUTS:
        from trainer.arguments import parser

        return schema.of_parser(parser())
    checkout, trainer = CHECKOUTS[backend], presets.families()[family]["backends"].get(backend)
    if trainer is None:
        return {}
    path = checkout.script(script or trainer["script"])
    if not path.is_file():
        return {}
    folder = checkout.path()
    return schema.flags_of(folder, path.relative_to(folder).as_posix(), commit(folder))


def check_extra(spec: "RunSpec") -> None:
    """Refuse flags that the backend's trainer does not have, and values that it refuses; those of the tables included.

    Raises:
        RunError: one fault for each wrong flag, with similar flags.
    """
    if found := flag_faults(spec) or table_faults(spec):
        raise RunError(found)


def table_faults(spec: "RunSpec") -> list[Fault]:
    """What the checkout's own parsers refuse in the run's commands; a fault of the trainer: the tables name it."""
    from runs.command import commands

    if spec.backend not in CHECKOUTS:
        return []
    family, found = presets.models()[spec.model]["family"], []
    for command in commands(spec, outputs_dir() / spec.slug):
        known = known_flags(spec.backend, family, command["script"])
        for flag, value in command["flags"].items() if known else ():
            # A flag of the user is checked with its own message, and one that is off is not written.
            if value is not False and flag not in spec.extra and (wrong := _not_taken(flag, value, known)):
                checkout = CHECKOUTS[spec.backend]
                text = f"{command['script']} in {checkout.path()} does not take --{flag}: {wrong}"
                found.append(Fault("backend", f"{text}; install the tested version: {START} {spec.backend}"))
        for name, entry in known.items():
            if entry["required"] and name not in command["flags"]:
                found.append(Fault("model", f"{command['script']} needs --{name}; add its file to the model's table"))
    return found


def flag_faults(spec: "RunSpec") -> list[Fault]:
    """The faults of the extra flags; a value that the trainer refuses because of a field is a fault of that field."""
    if not spec.extra:
        return []
    family = presets.models()[spec.model]["family"]
    known = known_flags(spec.backend, family)
    if not known:
        paths = {*presets.trainer_of(spec.model, spec.backend)["needs"], "tokenizer_cache_dir"}
        others = sorted(set(spec.extra) - paths)
        if others:
            checkout = CHECKOUTS[spec.backend]
            install = f"run {START} {spec.backend}, or set {checkout.variable}_DIR"
            reason = f"Cannot be checked, because {checkout.name} is not installed; {install}"
            return [Fault("extra", f"{', '.join(others)}: {reason}")]
        return []
    found = [wrong for flag, value in spec.extra.items() if (wrong := _wrong(flag, value, known, spec.backend))]
    if found or spec.backend != "diffusers":
        return [Fault("extra", wrong) for wrong in found]
    return _refused(spec)


def _refused(spec: "RunSpec") -> list[Fault]:
    """The error of the built-in trainer's parser for the run's complete arguments, as at the start."""
    from runs.command import arguments
    from runs.spec import ALIASES
    from trainer.arguments import problem

    try:
        wrong = problem(arguments(spec, outputs_dir() / spec.slug))
    except RunError:
        return []  # samples without a prompt: `create` says so
    if not wrong:
        return []
    named = re.match(r"(?:argument )?--(\w+)[: ]+", wrong)
    flag, text = (named[1], wrong[named.end() :]) if named else ("", wrong)
    field = ALIASES.get(flag, flag)
    if field in type(spec).model_fields and flag not in spec.extra:
        return [Fault(field, text)]
    return [Fault("extra", f"{flag}: {text}" if flag else text)]


def _wrong(flag: str, value: Any, known: Mapping[str, dict], backend: str) -> str | None:
    """What is wrong with one flag; None where it is valid on its own."""
    if flag not in known:
        from runs.spec import MEANT, RunSpec
        from trainer.arguments import reasons

        no = reasons() if backend == "diffusers" else {}
        unsupported = {name.removeprefix("--"): reason for name, reason in no.items()}
        if flag in unsupported:
            return f"{flag}: The built-in trainer does not support it: {unsupported[flag]}"
        names = {*known, *RunSpec.model_fields, *unsupported}
        close = [MEANT[flag]] if flag in MEANT else difflib.get_close_matches(flag, names, n=3)
        return f"{flag}: {backend} has no such flag; " + (f"did you mean {', '.join(close)}?" if close else "remove it")
    return _not_taken(flag, value, known) or _refused_later(flag, value, backend)


def _not_taken(flag: str, value: Any, known: Mapping[str, dict]) -> str | None:
    """What a parser with these flags says to a value; None where it takes it."""
    if flag not in known:
        return f"{flag}: There is no such flag"
    entry = known[flag]
    if entry["type"] == "bool":
        return None if isinstance(value, bool) else f"{flag}: Must be true or false, not {value!r}"
    if isinstance(value, bool):
        return None if value is False else f"{flag}: Add a value: {KINDS[entry['type']]}"
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not entry["nargs"]:
        return f"{flag}: Must be one value, not the list {value!r}"
    for one in values:
        if entry["choices"] and str(one) not in map(str, entry["choices"]):
            return f"{flag}: Must be one of {', '.join(map(str, entry['choices']))}, not {one!r}"
        kind = {"int": int, "float": float}.get(entry["type"])
        if kind:
            try:
                kind(str(one))
            except ValueError:
                return f"{flag}: Must be {KINDS[entry['type']]}, not {one!r}"
    return None


def _refused_later(flag: str, value: Any, backend: str) -> str | None:
    """What the code of sd-scripts refuses after minutes of loading, or Hangproof (presets/sanity.toml)."""
    table = presets.read_table("sanity.toml")["flags"].get(backend, {})
    choices = table.get("choices", {}).get(flag)
    if choices and value is not False and str(value).lower() not in map(str.lower, choices) and "." not in str(value):
        close = difflib.get_close_matches(str(value).lower(), {c.lower(): c for c in choices}, n=1)
        guess = next((f"; did you mean {choice}?" for choice in choices if choice.lower() in close), "")
        return f"{flag}: {value!r} is not supported with {backend}{guess or '; use one of ' + ', '.join(choices)}"
    if flag not in table.get("key_values", ()) or not isinstance(value, list):
        return None
    for word in value:
        key, equals, text = word.partition("=")
        if not equals or not key:
            return f"{flag}: {word!r} is not KEY=VALUE; write for example weight_decay=0.01"
        if flag in table["literals"]:
            try:
                ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return f"{flag}: {word!r} needs a number, True, False, a tuple or a quoted text after ="
    return None


def settings(lines: list[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The fields of a spec from `key=value` texts, added to `given`, and a fault for each text that cannot be parsed.

    Keys that are not fields go into `extra`. A list is JSON (`["a=1", "b=2"]`) or words separated by spaces.
    """
    from runs.spec import ALIASES, DEFAULTS, RunSpec, may_be_none

    out, extra, faults = dict(given), dict[str, str](), []
    for setting in lines:
        key, equals, text = setting.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        key = ALIASES.get(key, key)
        if not equals or not key:
            faults.append(Fault("extra", f"{setting!r} is not KEY=VALUE; write for example rank=16"))
        elif key not in RunSpec.model_fields or key == "extra":
            extra[key] = text
        elif key == "prompts":
            try:
                out[key] = _list(text, lambda t: [line for line in t.splitlines() if line.strip()])
            except ValueError as error:
                faults.append(Fault(key, str(error)))
        else:
            out[key] = None if may_be_none(key) and text.strip().lower() in ("none", "") else text
    if extra:
        key = presets.find_model(out.get("model", DEFAULTS["model"]))
        known = known_flags(out.get("backend", presets.backend_of(key)), presets.models()[key]["family"])
        out["extra"] = {}
        for key, text in extra.items():
            try:
                out["extra"][key] = flag_value(text, known.get(key))
            except ValueError as error:
                faults.append(Fault("extra", f"{key}: {error}"))
    return out, faults


def _list(text: str, split) -> list[str]:
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f'{text[:200]!r} is not a JSON list ({error}); write for example ["a", "b"]') from error
        return [str(value) for value in values]
    return split(text)


def flag_value(text: str, entry: dict | None) -> Any:
    """A flag's value converted to its type; text that cannot be converted stays, and check_extra refuses it."""
    word = SWITCH.get(text.strip().lower())
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
        if kind is float and text.rstrip().endswith("%"):  # a share of the steps, such as lr_warmup_steps=10%
            return float(text.rstrip()[:-1]) / 100
        return kind(text) if kind else text
    except ValueError:
        return text
