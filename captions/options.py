"""The options of a job that writes captions, by name as a draft stores them, and the engine that they name."""

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from captions import endpoint, florence, job, models, tagger
from captions.text import framed
from captions.work import Work
from presets.tables import read_toml
from runs.files import RunError

_TABLE = read_toml(Path(__file__).with_suffix(".toml"))
ENGINES: dict[str, dict[str, str]] = _TABLE["engines"]
# (engine, or "all" for an option of each; name): its row
FIELDS = {(engine, name): row for engine, rows in _TABLE["options"].items() for name, row in rows.items()}
DEFAULTS: dict[str, Any] = {**{name: row["default"] for (_, name), row in FIELDS.items()}, "trigger": ""}
LINE = re.compile(r"[^\x00-\x1f\x7f]{0,500}")
PROMPT = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]{0,4000}")


def checked(given: Any) -> dict[str, Any]:
    """All options, those given and the others. Raises RunError: one cannot be used, or what it needs is not here."""
    if not isinstance(given, dict) or not given.keys() <= {"engine", *DEFAULTS} or given.get("engine") not in ENGINES:
        raise RunError("These are not options of the captions; start them again")
    options = {**DEFAULTS, **given}
    for name, usual in DEFAULTS.items():
        value, wanted = options[name], (int, float) if isinstance(usual, float) else type(usual)
        if not isinstance(value, wanted) or (name == "task" and value not in florence.TASKS):
            raise RunError(f"{name}: {value!r} is not a value of this option; start the captions again")
        if isinstance(value, str) and not (PROMPT if name == "prompt" else LINE).fullmatch(value):
            raise RunError("Use at most 500 characters on one line, and at most 4,000 for the instruction")
        if isinstance(usual, float) and not 0 < value <= 1:
            raise RunError("A threshold is a number above 0 and at most 1, such as 0.35")
    options["prompt"] = options["prompt"].strip() or DEFAULTS["prompt"]
    if options["engine"] == "endpoint":
        server_of(options)
        return options
    models.find(options["engine"], options["model"])
    if options["engine"] == "tagger" and importlib.util.find_spec("onnxruntime") is None:
        raise RunError(tagger.INSTALL)
    return options


def server_of(options: Mapping[str, Any]) -> endpoint.Server:
    """The server that the options name. Raises as endpoint.checked."""
    server = endpoint.Server(options["url"], options["model"], options["prompt"], options["key_variable"])
    return endpoint.checked(server)


def write(work: Work, options: Mapping[str, Any]) -> job.Report:
    """Write the missing captions of `work` with checked options. Raises RunError as job.run."""
    frame = functools.partial(framed, **{name: options[name] for name in ("prefix", "suffix", "trigger")})
    if options["engine"] == "endpoint":
        limit_s = endpoint.TRIES * (endpoint.REQUEST_S + endpoint.LONGEST_PAUSE_S) + 30.0
        ask = functools.partial(endpoint.ask, server_of(options))
        return job.run(work, lambda: ask, frame, image_s=limit_s)
    return job.run(work, _loader(options, bool(work.missing())), frame)


def _loader(options: Mapping[str, Any], needed: bool) -> Callable[[], job.Describe]:
    """What loads the engine. The model's files are fetched here, because a download has limits of its own."""
    found = models.find(options["engine"], options["model"])
    if isinstance(found, Path):
        folder, gpu_gb = found, 0.0
    else:
        folder, gpu_gb = models.fetch(found, job.say) if needed else Path(), found.gpu_gb

    def load() -> job.Describe:
        job.say(f"Loading {found.name}…")
        if options["engine"] == "florence":
            return florence.load(folder, options["task"], gpu_gb)
        names = ("general", "character", "without", "underscores")
        return tagger.load(folder, gpu_gb, **{name: options[name] for name in names})

    return load
