"""The catalogue of fields: keys, labels and help texts, as one table that the form and the import read."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Field:
    """One field of the form. `key`: its name in RunSpec; `kind`: integer, text, lines or choice; `info`: help text."""

    key: str
    label: str
    kind: str
    info: str = ""
    choices: tuple[Any, ...] = ()


PRECISIONS = (("bf16",) * 2, ("fp16",) * 2, ("float32", "no"))
TRACKERS = (("none", ""), ("TensorBoard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio"))
LENGTH = (
    Field("repeats", "Repeats", "integer", "How often each image is used per epoch"),
    Field("epochs", "Epochs", "integer", "Passes over all images"),
    Field("resolution", "Resolution", "integer", "Pixels per side, a multiple of 32"),
)
MORE = (
    Field("rank", "Rank", "integer", "Size of the LoRA, usually 4 to 32"),
    Field("alpha", "Alpha", "text", "Strength scaling; usually equal to or half the rank"),
    Field("learning_rate", "Learning rate", "text", "Size of each training step, e.g. 0.0001"),
    Field("batch_size", "Batch size", "integer", "Images per step"),
    Field("gradient_accumulation", "Gradient accumulation", "integer", "Batches per optimizer step"),
    Field("max_train_steps", "Maximum steps", "text", "Leave empty to use epochs"),
    Field("save_every_n_epochs", "Save a LoRA every N epochs", "integer", "0 saves only the final LoRA"),
    Field("save_every_n_steps", "Save a checkpoint every N steps", "text", "Leave empty for a tenth of the run"),
    Field("keep_states", "Checkpoints to keep", "integer", "Older ones are deleted"),
    Field(
        "validation_split",
        "Images held out",
        "text",
        "Share that is not trained on, e.g. 0.1; its loss shows overfitting",
    ),
    Field("validate_every_n_steps", "Validate every N steps", "text", "Leave empty to validate with each sample"),
    Field("seed", "Seed", "integer", "The same seed gives the same run"),
    Field("workers", "Data loader workers", "integer", "Processes that load images"),
    Field("mixed_precision", "Precision", "choice", "bf16 suits most GPUs", PRECISIONS),
    Field("trackers", "Also log to", "choice", "A tracker that records the loss", TRACKERS),
)
SAMPLES = (
    Field("prompts", "Sample prompts, one per line", "lines", "Leave empty to use the trigger word"),
    Field(
        "sample_every_n_steps",
        "Generate samples every N steps",
        "text",
        "Leave empty for a tenth of the run; 0 turns samples off",
    ),
    Field("sample_steps", "Sampling steps", "integer", "More steps are slower and more detailed"),
)
MACHINES = (
    Field(
        "store",
        "Store",
        "text",
        "Keeps the run on another disk: a folder, s3://bucket/runs, hf://buckets/me/runs, sftp://…",
    ),
    Field("gpus", "GPUs per machine", "integer", "All train this run together"),
    Field("nodes", "Machines", "integer", "More than one need a common network and disk"),
    Field("price_per_hour", "Price per hour", "text", "What the machines cost together, in any currency"),
    Field("spend_limit", "Spend limit", "text", "The run stops with a checkpoint before it costs more"),
)
FLAGS = Field(
    "flags", "Extra trainer options, one per line", "lines", "Use the trainer's names, e.g. noise_offset=0.05"
)
# Only for models with `control`: the page shows it for them alone.
CONTROL = Field(
    "control_dir",
    "Folder of control images",
    "text",
    "One for each image, under the same name: what the edit starts from",
)
HEAD = ("name", "trigger", "model", "tier", "backend")
KEYS = (*HEAD, *(field.key for field in (CONTROL, *LENGTH, *SAMPLES, *MORE, *MACHINES, FLAGS)))


LABELS = {"name": "Name", "trigger": "Trigger word", "model": "Base model", "tier": "VRAM", "backend": "Trainer"}
LABELS |= {field.key: field.label for field in (CONTROL, *LENGTH, *SAMPLES, *MORE, *MACHINES)}
LABELS["prompts"] = "Sample prompts"
LABELS |= {"flags": "Extra trainer options", "images": "Images", "script": "The script"}
# Fields that may be empty, and the value of the spec that an empty one gives.
EMPTY = {
    "max_train_steps": None,
    "save_every_n_steps": None,
    "sample_every_n_steps": None,
    "validation_split": 0.0,
    "validate_every_n_steps": None,
    "trackers": "",
    "prompts": "",
    "store": "",
    "price_per_hour": 0.0,
    "spend_limit": 0.0,
}
