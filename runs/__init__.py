"""A run on disk: its spec, its data set, its script, the layout of its folder.

Names are loaded on first use: the monitor and the page import this package and must stay small, while pydantic (in
`runs.spec`) and Pillow (when images are added) are large. No module here has the name of an exported function, because
importing the module would replace the function.
"""

import importlib

_NAMES = {
    "files": ("RunError",),
    "paths": ("ROOT", "data_root", "outputs_dir", "datasets_dir", "models_dir", "run_folder", "list_runs", "script_name", "slug", "free_name"),
    "spec": ("RunSpec", "make", "load", "save", "dumps"),
    "command": ("arguments", "dataset_tables", "sample_prompts"),
    "job": ("resolve",),
    "pin": ("pinned",),
    "scripts": ("script",),
    "folders": ("create", "render", "write_attempt", "longer", "train_longer", "planned_steps", "with_intervals", "problems"),
    "weights": ("fetch_model", "missing_files"),
    "dataset": ("read_captions", "images_in"),
}  # fmt: skip


def __getattr__(name: str):
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'runs' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"runs.{module}"), name)
    globals()[name] = value
    return value
