"""`RunSpec`: the complete description of a run, saved as `run.toml`. `job.json` is made from it once (runs/job.py).

A pydantic model, because its errors name the field and because unknown keys must be refused. Its sentences are for
programmers ("unable to parse string as an integer"), so SENTENCES has one of ours for each type of error. The script,
the data-set file and the prompts are rendered from it: the same spec gives the same bytes.
"""

import contextlib
import difflib
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import presets
from runs import env_file
from runs.files import Fault, RunError, atomic_write
from runs.paths import slug


def _no_nul(text: str) -> str:
    if NO_TEXT.search(text):
        raise ValueError(NUL)
    return text


NO_TEXT, NUL = re.compile("[\0\ud800-\udfff]"), "Contains a NUL character, or bytes that are not UTF-8; remove it"
DEFAULTS = presets.defaults()["run"]
Text = Annotated[str, AfterValidator(_no_nul)]
Value = bool | int | float | str | list[str]
MOST = 10**12  # of any count: runs/sanity.py judges far smaller ones, and computes with floats
Steps = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

# Flags that the run's folder determines.
RESERVED_FLAGS = (
    "output_dir", "output_name", "dataset_config", "train_data_dir", "reg_data_dir", "in_json", "sample_prompts",
    "resume", "config_file", "output_config", "logging_dir", "debug_dataset", "skip_existing",
)  # fmt: skip
# Environment variables that the script or the monitor sets.
RESERVED_VARIABLES = (
    "PYTHONPATH",
    "ACCELERATE",
    "TRAINER_PYTHON",
    *(f"HANGPROOF_{n}" for n in ("RUN", "ATTEMPT", "TOKEN", "HEARTBEAT", "WORLD")),
    *(f"HANGPROOF_{n}" for n in ("NODE", "MAIN_ADDRESS", "MAIN_PORT")),
)


WHOLE = "Not a whole number; write for example 4"
NUMBER = "Not a number; write for example 0.0001"
VALUE = "Must be text, a number, true, false or a list of texts"

# Type of pydantic's error -> a sentence; {…} are limits from the error's context.
SENTENCES: dict[str, str] = {
    "missing": "Missing; add a value",
    "string_type": "Must be text",
    "string_unicode": "Not valid Unicode text; type it again",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), WHOLE),
    "int_parsing_size": "Too large; write a smaller number",
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), NUMBER),
    "greater_than_equal": "Must be {ge} or more",
    "greater_than": "Must be more than {gt}",
    "less_than_equal": "Must be {le} or less",
    "less_than": "Must be less than {lt}",
    "multiple_of": "Must be a multiple of {multiple_of}",
    "literal_error": "Must be {choices}",
    "list_type": "Must be a list of texts",
    "dict_type": "Must be a table of names and values",
    "invalid_key": "The name of a field must be text",
    "model_type": "Must be a table of fields",
    "extra_forbidden": "Unknown field; {similar}",
}
UNKNOWN = "Not a valid value; compare with `python -m runs show NAME`"


class FieldError(ValueError):
    """A fault found by a validator of the whole model, which must name the field itself."""

    def __init__(self, field: str, message: str):
        self.field = field
        super().__init__(message)


class Edited(BaseModel):
    """A script that a person edited, and the one that the spec gave then (runs/custom_script.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    script: Annotated[str, Field(max_length=200_000)]
    generated: Annotated[str, Field(max_length=200_000)]


ABOUT: dict[str, Any] = {"choices": (), "written": "", "refused": {}}
"""More of a field. choices: pairs of label and value. written: where runs/command.py writes the flag of a value that is
not the default ("command" or "data set"); "" where it has a rule of its own. refused: by trainer, why it has none."""


def shown(group: str, default: Any, label: str, info: str = "", flag: str = "", **more: Any) -> Any:
    """A field that the form shows (runs/fields.py); a plain flag is declared here and nowhere else.

    Args:
        group: where in the form. info: its help text.
        flag: what the trainers call it, where that is another name. more: of ABOUT, and limits of pydantic's Field.
    """
    about = {"group": group, "flag": flag, **{key: more.pop(key, usual) for key, usual in ABOUT.items()}}
    return Field(default, title=label, description=info, json_schema_extra=about, **more)


in_head, in_control, in_length, in_samples, in_more, in_machines = (
    partial(shown, group) for group in ("head", "control", "length", "samples", "more", "machines")
)
PRECISIONS = (("bf16",) * 2, ("fp16",) * 2, ("float32", "no"))
TRACKERS = (("none", ""), ("TensorBoard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio"))


class RunSpec(BaseModel):
    """A run. Missing fields come from the model's settings, then from presets/defaults.toml."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, frozen=True)

    name: Text = in_head(..., "Name", "Name of the LoRA and its folder")
    trigger: Text = in_head("", "Trigger word", "The word you type in a prompt to use this LoRA")
    model: str = in_head(DEFAULTS["model"], "Base model", "The model you will use the LoRA with")
    tier: str = in_head(DEFAULTS["tier"], "VRAM", "Memory of the GPU you train on")  # a table of presets/tiers.toml
    backend: Literal["sd-scripts", "diffusers", "musubi"] = in_head(
        DEFAULTS["backend"], "Trainer", "Chosen to suit the base model; if unsure, keep it"
    )
    # Only for models that learn from pairs (Kontext, Qwen-Image-Edit): the page shows it for them alone.
    control_dir: Text = in_control(
        "", "Folder of control images", "One for each image, under the same name: what the edit starts from"
    )
    repeats: Count = in_length(
        DEFAULTS["repeats"], "Repeats", "How often each image is used per epoch", "dataset_repeats"
    )
    epochs: Count = in_length(DEFAULTS["epochs"], "Epochs", "Passes over all images", "max_train_epochs")
    resolution: int = in_length(
        DEFAULTS["resolution"], "Resolution", "Pixels per side, a multiple of 32", ge=32, le=4096, multiple_of=32
    )
    prompts: list[Text] = in_samples([], "Sample prompts, one per line", "Leave empty to use the trigger word")
    sample_every_n_steps: Steps | None = in_samples(
        DEFAULTS["sample_every_n_steps"],
        "Generate samples every N steps",
        "Leave empty for a tenth of the run; 0 turns samples off",
    )
    sample_steps: int = in_samples(
        DEFAULTS["sample_steps"], "Sampling steps", "More steps are slower and more detailed", ge=1, le=10_000
    )
    rank: int = in_more(DEFAULTS["rank"], "Rank", "Size of the LoRA, usually 4 to 32", "network_dim", ge=1, le=16_384)
    alpha: Real = in_more(
        DEFAULTS["alpha"], "Alpha", "Strength scaling; usually equal to or half the rank", "network_alpha", gt=0
    )
    learning_rate: Real = in_more(
        DEFAULTS["learning_rate"], "Learning rate", "Size of each training step, e.g. 0.0001", gt=0
    )
    batch_size: Count = in_more(DEFAULTS["batch_size"], "Batch size", "Images per step", "train_batch_size")
    gradient_accumulation: int = in_more(
        DEFAULTS["gradient_accumulation"],
        "Gradient accumulation",
        "Batches per optimizer step",
        "gradient_accumulation_steps",
        written="command",
        ge=1,
        le=10_000,
    )
    max_train_steps: Count | None = in_more(None, "Maximum steps", "Leave empty to use epochs")
    save_every_n_epochs: Steps = in_more(
        DEFAULTS["save_every_n_epochs"], "Save a LoRA every N epochs", "0 saves none between the epochs"
    )
    save_every_n_steps: Steps | None = in_more(
        None, "Save a checkpoint every N steps", "Leave empty for a tenth of the run"
    )
    keep_states: Count = in_more(DEFAULTS["keep_states"], "Checkpoints to keep", "Older ones are deleted")
    caption_dropout: Share = in_more(
        0.0,
        "Uses without a caption",
        "Share of an image's uses, e.g. 0.05; the built-in trainer only",
        "caption_dropout_rate",
        written="data set",
        refused=dict.fromkeys(("sd-scripts", "musubi"), "kohya's trainers encode captions once"),
    )
    validation_split: Share = in_more(
        0.0,
        "Images held out",
        "Share that is not trained on, e.g. 0.1; its loss shows overfitting",
        refused={"musubi": "kohya's musubi-tuner cannot hold out images"},
        le=0.5,
    )
    validate_every_n_steps: Count | None = in_more(
        None, "Validate every N steps", "Leave empty to validate with each sample"
    )
    seed: int = in_more(DEFAULTS["seed"], "Seed", "The same seed gives the same run", ge=0, lt=2**32)
    workers: int = in_more(
        DEFAULTS["workers"],
        "Data loader workers",
        "Processes that load images",
        "max_data_loader_n_workers",
        ge=0,
        le=256,
    )
    mixed_precision: Literal["bf16", "fp16", "no"] = in_more(
        DEFAULTS["mixed_precision"], "Precision", "bf16 suits most GPUs", choices=PRECISIONS
    )
    # trackio is logged by monitor/trackio_feed.py
    trackers: Literal["", "tensorboard", "wandb", "trackio", "all"] = in_more(
        "", "Also log to", "A tracker that records the loss", "log_with", choices=TRACKERS
    )
    store: Text = in_machines(
        "", "Store", "Keeps the run on another disk: a folder, s3://bucket/runs, hf://buckets/me/runs, sftp://…"
    )
    gpus: int = in_machines(DEFAULTS["gpus"], "GPUs per machine", "All train this run together", ge=1, le=64)
    nodes: int = in_machines(1, "Machines", "More than one need a common network and disk", ge=1, le=256)
    price_per_hour: Real = in_machines(0.0, "Price per hour", "What the machines cost together, in any currency", ge=0)
    spend_limit: Real = in_machines(0.0, "Spend limit", "The run stops with a checkpoint before it costs more", ge=0)
    keep_tokens: Steps = DEFAULTS["keep_tokens"]
    save_dir: Text = ""  # folder that checkpoints are written to; "" is the run's folder
    environment: dict[str, Text] = Field({}, repr=False)  # variables of the training process; of secrets in memory only
    secrets: list[str] = []  # the variables whose values are in the run's file of secrets (runs/env_file.py)
    extra: dict[str, Value] = {}  # other flags of the trainer; they override the flags of the fields
    edited: Edited | None = None  # the script as a person edited it; None: as the other fields give it

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Add the model's settings for missing fields, and replace the model's display name by its key."""
        if not isinstance(data, dict):
            return data
        name = data.get("model", DEFAULTS["model"])
        if isinstance(name, str):
            try:
                key = presets.find_model(name)
            except presets.PresetError as error:
                raise FieldError("model", str(error)) from error
            data = {"backend": presets.backend_of(key), **presets.models()[key]["settings"], **data, "model": key}
        if any(map(data.get, env_file.MAY_HOLD)):
            data = env_file.moved(data)
        if isinstance(data.get("tier"), str):
            data = {**data, "tier": data["tier"].strip().upper().removesuffix("+")}
        return data

    @field_validator("name")
    @classmethod
    def _name_makes_a_folder(cls, name: str) -> str:
        try:
            slug(name)
        except RunError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("tier")
    @classmethod
    def _tier_exists(cls, tier: str) -> str:
        if tier not in presets.tiers():
            raise ValueError(f"Must be one of {', '.join(presets.tiers())}")
        return tier

    @field_validator("store")
    @classmethod
    def _store_holds_no_secret(cls, store: str) -> str:
        if store and env_file.is_secret("", store):
            raise ValueError("An address with a password or key would be saved; set variables, or log in there")
        return store

    @field_validator("prompts")
    @classmethod
    def _prompts(cls, prompts: list[str]) -> list[str]:
        return [p for p in prompts if p.strip()]

    @field_validator("environment", "secrets")
    @classmethod
    def _environment(cls, environment: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        for name in environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in RESERVED_VARIABLES:
                raise ValueError(f"{name!r} cannot be set; use letters, digits and _, and no variable of Hangproof")
        return environment

    @field_validator("extra")
    @classmethod
    def _extra(cls, extra: dict[str, Value], info: Any) -> dict[str, Value]:
        for flag, value in extra.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", flag):
                raise ValueError(f"{flag!r} is not the name of a flag; write it without --, such as guidance_scale")
            field = ALIASES.get(flag, flag)
            # A field that this trainer refuses was a flag in earlier versions, and stays one.
            if field in cls.model_fields and info.data.get("backend") not in about(field).get("refused", {}):
                raise ValueError(f"{flag}: Set the field {field} instead")
            if flag in RESERVED_FLAGS:
                raise ValueError(f"{flag}: The run's folder determines this flag; remove it")
            values = value if isinstance(value, list) else [value]
            if any(isinstance(v, str) and NO_TEXT.search(v) for v in values):
                raise ValueError(f"{flag}: {NUL}")
            if isinstance(value, list) and any(v.startswith("-") for v in value):
                raise ValueError(f"{flag}: A value in a list cannot start with a dash; change {value}")
        return extra

    @model_validator(mode="after")
    def _backend_trains_model(self) -> "RunSpec":
        able = presets.models()[self.model]["backends"]
        if self.backend not in able:
            raise FieldError("backend", f"{self.backend} cannot train {self.model}; use {' or '.join(able)}")
        if problem := presets.tiers_of(self.model, self.backend)[self.tier]["problem"]:
            raise FieldError("tier", problem)
        for key in type(self).model_fields:
            if (why := about(key).get("refused", {}).get(self.backend)) and getattr(self, key):
                raise FieldError(key, f"{why}; leave this empty")
        precisions = presets.trainer_of(self.model, self.backend)["precisions"]
        if precisions and self.mixed_precision not in precisions:
            raise FieldError("mixed_precision", f"{self.model} needs {' or '.join(precisions)}")
        return self

    @cached_property
    def slug(self) -> str:
        """The name of the run's folder and files."""
        return slug(self.name)

    def written(self, place: str) -> dict[str, Any]:
        """The fields that are written as they are to "command" or "data set", by flag; none that has its default."""
        rows = [(about(key), getattr(self, key), field.default) for key, field in type(self).model_fields.items()]
        return {said["flag"]: value for said, value, usual in rows if said.get("written") == place and value != usual}

    def public(self) -> dict[str, Any]:
        """Its fields without the values of secrets, for everything that is written or shown."""
        fields = self.model_dump()
        return {**fields, "environment": {k: v for k, v in self.environment.items() if k not in self.secrets}}

    def changed(self, **fields: Any) -> "RunSpec":
        """A copy with other values, validated like a new spec. Raises RunError."""
        return make({**self.model_dump(), **fields})


def about(key: str) -> dict[str, Any]:
    """What `shown` says of a field."""
    said = RunSpec.model_fields[key].json_schema_extra
    return said if isinstance(said, dict) else {}


def may_be_none(key: str) -> bool:
    """Whether a field can be left open."""
    return type(None) in get_args(RunSpec.model_fields[key].annotation)


ALIASES: dict[str, str] = {about(key)["flag"]: key for key in RunSpec.model_fields if about(key).get("flag")}
"""Flags of sd-scripts that are fields with another name: `--set network_dim=8` sets rank."""
# Names that people try instead of a field's; the error for one names the field.
MEANT = {"lr": "learning_rate", "steps": "max_train_steps", "dim": "rank", "batch": "batch_size"}


def make(fields: dict[str, Any]) -> RunSpec:
    """A validated RunSpec from plain values.

    Raises:
        RunError: one fault for each wrong field.
    """
    try:
        return RunSpec.model_validate(fields)
    except ValidationError as error:
        # A value of `extra` is tried as each type of a union, and each type reports an error: one line is enough.
        raise RunError(dict.fromkeys(map(_fault, error.errors()))) from error


def _fault(error: Mapping[str, Any]) -> Fault:
    """The field that pydantic refuses, and why, as a sentence of ours."""
    # A name that is no plain word is quoted.
    parts = [part for part in error["loc"] if part != "[key]"]
    place = [str(part) if re.fullmatch(r"[\w-]+", str(part)) else repr(part) for part in parts]
    field, inside = (place[0] if place else "run.toml"), "".join(f"{part}: " for part in place[1:])
    if field == "prompts" and inside:
        inside = f"Prompt {int(place[1]) + 1}: "
    if error["type"] == "value_error":  # raised by a validator of the model: already a sentence of ours
        found = error["ctx"]["error"]
        return Fault(found.field if isinstance(found, FieldError) else field, f"{inside}{found}")
    if field == "extra" and inside:
        return Fault(field, f"{place[1]}: {VALUE}")
    details = {key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()}
    close, known = difflib.get_close_matches(field, RunSpec.model_fields, n=3), RunSpec.model_fields.get(field)
    details["similar"] = f"did you mean {', '.join(close)}?" if close else "remove it"
    values = get_args(known.annotation) if known else ()
    details["choices"] = f"one of {', '.join(str(value) for value in values if value != '')}"
    details["choices"] += ", or empty" * ("" in values)
    return Fault(field, inside + SENTENCES.get(error["type"], UNKNOWN).format(**details))


def dumps(spec: RunSpec) -> str:
    """The spec as TOML, with every field, so that a new default does not change an old run."""
    import tomlkit

    fields = {key: value for key, value in spec.public().items() if value is not None and (key != "secrets" or value)}
    tables = {key: dict(sorted(fields.pop(key).items())) for key in ("environment", "extra")}
    if spec.edited:
        tables["edited"] = {key: _lines(text) for key, text in fields.pop("edited").items()}
    head = "# What this run trains. After a change, write the script again: python -m runs render NAME\n"
    return head + tomlkit.dumps({**fields, **tables})


def _lines(text: str) -> Any:
    """A text of several lines as TOML that a person can read; where TOML would change it, on one line with escapes."""
    import tomlkit

    changed = (
        text.startswith("\n") or "'''" in text or text.endswith("'") or re.search(r"[^\t\n\x20-\x7e\xa0-\ud7ff]", text)
    )
    return text if changed else tomlkit.string(text, literal=True, multiline=True)


def save(folder: Path, spec: RunSpec, final: Path | None = None) -> None:
    """Write `run.toml` atomically, and keep the values of secrets apart. final: where `folder` is renamed to."""
    env_file.keep(final or Path(folder), spec)
    atomic_write(Path(folder) / "run.toml", dumps(spec))


def load(folder: Path) -> RunSpec:
    """The spec in a run's folder.

    Raises:
        RunError: the file is missing or not valid TOML, or fields are wrong; the message names the file and the fields.
    """
    path = Path(folder) / "run.toml"
    try:
        fields = presets.tables.read_toml(path)
    except FileNotFoundError as error:
        raise RunError(f"{path} does not exist; create a run with `python -m runs new`") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except presets.PresetError as error:
        raise RunError(str(error)) from error
    try:
        spec = make(fields)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    being_made = any(part.startswith(".") for part in path.absolute().parts[-3:-1])  # or being fetched
    if env_file.exposed(fields) and not being_made:  # a person wrote secrets into it: they get a file of their own
        with contextlib.suppress(OSError, RunError):  # a disk that cannot be written stays as it is
            save(path.parent, spec)
    return env_file.filled(spec, Path(folder))
