"""`RunSpec`: what a run is, in full; saved as `run.toml`, the one source of truth.

A pydantic model because its errors name the field and because unknown keys must be refused. Everything else (script,
data-set file, prompts) is rendered from it, so that the same spec gives the same bytes.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import presets
from runs.files import RunError, atomic_write
from runs.paths import slug

DEFAULTS = presets.defaults()["run"]
Value = bool | int | float | str | list[str]
Steps = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]

# sd-scripts' flags that a field stands for: `--set network_dim=8` means rank.
ALIASES = {
    "network_dim": "rank",
    "network_alpha": "alpha",
    "train_batch_size": "batch_size",
    "dataset_repeats": "repeats",
    "max_train_epochs": "epochs",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_data_loader_n_workers": "workers",
    "log_with": "trackers",
}
# Flags that follow from the run's folder; a second value would contradict it.
RESERVED_FLAGS = (
    "output_dir",
    "output_name",
    "dataset_config",
    "train_data_dir",
    "reg_data_dir",
    "in_json",
    "sample_prompts",
    "resume",
    "config_file",
    "output_config",
    "logging_dir",
    "debug_dataset",
)
# Variables that the script or the monitor sets.
RESERVED_VARIABLES = ("PYTHONPATH", "ACCELERATE", *(f"HANGPROOF_{n}" for n in ("RUN", "ATTEMPT", "TOKEN", "HEARTBEAT")))


class RunSpec(BaseModel):
    """A run. Fields not given come from the model's settings, then from presets/defaults.toml."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, frozen=True)

    name: str
    trigger: str = ""
    model: str = DEFAULTS["model"]
    tier: Literal["12G", "16G", "20G"] = DEFAULTS["tier"]
    backend: Literal["sd-scripts", "diffusers"] = DEFAULTS["backend"]
    resolution: Annotated[int, Field(ge=32, le=4096, multiple_of=32)] = DEFAULTS["resolution"]
    batch_size: Count = DEFAULTS["batch_size"]
    repeats: Count = DEFAULTS["repeats"]
    epochs: Count = DEFAULTS["epochs"]
    max_train_steps: Count | None = None
    gradient_accumulation: Count = DEFAULTS["gradient_accumulation"]
    rank: Count = DEFAULTS["rank"]
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DEFAULTS["alpha"]
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DEFAULTS["learning_rate"]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = DEFAULTS["seed"]
    workers: Steps = DEFAULTS["workers"]
    gpus: Count = DEFAULTS["gpus"]
    mixed_precision: Literal["bf16", "fp16", "no"] = DEFAULTS["mixed_precision"]
    save_every_n_steps: Steps | None = None
    save_every_n_epochs: Steps = DEFAULTS["save_every_n_epochs"]
    keep_states: Count = DEFAULTS["keep_states"]
    prompts: list[str] = []
    sample_every_n_steps: Steps = DEFAULTS["sample_every_n_steps"]
    sample_steps: Count = DEFAULTS["sample_steps"]
    keep_tokens: Steps = DEFAULTS["keep_tokens"]
    trackers: Literal["", "tensorboard", "wandb", "all"] = ""
    save_dir: str = ""  # where states are written first; "" is the run's own folder
    environment: dict[str, str] = {}  # variables of the training process
    extra: dict[str, Value] = {}  # further flags of the trainer

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Take the model's own settings for what was not given, and write its key however it was called."""
        if not isinstance(data, dict):
            return data
        name = data.get("model", DEFAULTS["model"])
        if isinstance(name, str):
            try:
                key = presets.find_model(name)
            except presets.PresetError as error:
                raise ValueError(str(error)) from error
            data = {**presets.models()[key]["settings"], **data, "model": key}
        if isinstance(data.get("tier"), str):
            data = {**data, "tier": data["tier"].strip().upper().removesuffix("+")}
        return data

    @field_validator("name", "trigger", "save_dir")
    @classmethod
    def _one_line(cls, text: str) -> str:
        if "\0" in text:
            raise ValueError("holds a NUL character, which no file or command line can")
        return text

    @field_validator("name")
    @classmethod
    def _name_makes_a_folder(cls, name: str) -> str:
        try:
            slug(name)
        except RunError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("prompts")
    @classmethod
    def _prompts(cls, prompts: list[str]) -> list[str]:
        if any("\0" in p for p in prompts):
            raise ValueError("a prompt holds a NUL character")
        return [p for p in prompts if p.strip()]

    @field_validator("environment")
    @classmethod
    def _environment(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in RESERVED_VARIABLES:
                raise ValueError(f"{name!r} is not a variable that a run can set")
            if "\0" in value:
                raise ValueError(f"{name} holds a NUL character")
        return environment

    @field_validator("extra")
    @classmethod
    def _extra(cls, extra: dict[str, Value]) -> dict[str, Value]:
        for flag, value in extra.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", flag):
                raise ValueError(f"{flag!r} is not a flag's name; write it without dashes, e.g. guidance_scale")
            if flag in ALIASES or flag in cls.model_fields:
                raise ValueError(f"{flag} is the field {ALIASES.get(flag, flag)!r}; set that")
            if flag in RESERVED_FLAGS:
                raise ValueError(f"{flag} follows from the run's folder and cannot be set")
            values = value if isinstance(value, list) else [value]
            if any(isinstance(v, str) and "\0" in v for v in values):
                raise ValueError(f"{flag} holds a NUL character")
            if isinstance(value, list) and any(v.startswith("-") for v in value):
                raise ValueError(f"{flag}: a value of a list cannot start with a dash: {value}")
        return extra

    @model_validator(mode="after")
    def _backend_loads_model(self) -> "RunSpec":
        able = presets.models()[self.model]["backends"]
        if self.backend not in able:
            raise ValueError(f"model {self.model} cannot be trained with {self.backend}, only with {', '.join(able)}")
        return self

    @cached_property
    def slug(self) -> str:
        """The run's folder and file name."""
        return slug(self.name)

    def changed(self, **fields: Any) -> "RunSpec":
        """A copy with other values, checked like a new one. Raises RunError."""
        return make({**self.model_dump(), **fields})


def make(fields: dict[str, Any]) -> RunSpec:
    """A RunSpec of plain values.

    Raises:
        RunError: one line a fault, each naming its field; unknown fields come with the closest known ones.
    """
    try:
        return RunSpec.model_validate(fields)
    except ValidationError as error:
        raise RunError("\n".join(_sentence(fault) for fault in error.errors())) from error


def _sentence(fault: dict) -> str:
    import difflib

    field = ".".join(str(part) for part in fault["loc"]) or "spec"
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(field, RunSpec.model_fields, n=3)
        return f"{field}: no such field" + (f"; did you mean {', '.join(close)}?" if close else "")
    message = fault["msg"].removeprefix("Value error, ")
    shown = repr(fault["input"])
    return f"{field}: {message}" + ("" if isinstance(fault["input"], dict) or len(shown) > 80 else f" (got {shown})")


def dumps(spec: RunSpec) -> str:
    """The spec as TOML; every field is written, so that a later default does not change an old run."""
    import tomlkit

    fields = {key: value for key, value in spec.model_dump().items() if value is not None}
    tables = {key: dict(sorted(fields.pop(key).items())) for key in ("environment", "extra")}
    head = "# What this run trains. Change it, then: python -m runs render NAME\n"
    return head + tomlkit.dumps({**fields, **tables})


def save(folder: Path, spec: RunSpec) -> None:
    """Write `run.toml`, whole or not at all."""
    atomic_write(Path(folder) / "run.toml", dumps(spec))


def load(folder: Path) -> RunSpec:
    """The spec of a run's folder.

    Raises:
        RunError: the file is missing, is not TOML, or a field is wrong: each is named.
    """
    path = Path(folder) / "run.toml"
    try:
        fields = presets.tables.read_toml(path)
    except FileNotFoundError as error:
        raise RunError(f"{path} does not exist; a run is made by `python -m runs new`") from error
    except presets.PresetError as error:
        raise RunError(str(error)) from error
    try:
        return make(fields)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
