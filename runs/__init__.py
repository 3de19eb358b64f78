"""A run on disk: its spec, its data set, its script, the layout of its folder.

Names are loaded on first use: the monitor and the page import this package and must stay small, while pydantic (in
`runs.spec`) and Pillow (when images are added) are large. No module here has the name of an exported function, because
importing the module would replace the function.
"""

import importlib

_WHERE = {
    "RunError": "files",
    "ROOT": "paths",
    "data_root": "paths",
    "outputs_dir": "paths",
    "datasets_dir": "paths",
    "models_dir": "paths",
    "run_folder": "paths",
    "list_runs": "paths",
    "slug": "paths",
    "free_name": "paths",
    "RunSpec": "spec",
    "make": "spec",
    "load": "spec",
    "save": "spec",
    "dumps": "spec",
    "arguments": "command",
    "dataset_toml": "command",
    "sample_prompts": "command",
    "resolve": "job",
    "pinned": "pin",
    "script": "scripts",
    "script_name": "scripts",
    "quote": "quoting",
    "quote_cmd": "quoting",
    "create": "folders",
    "render": "folders",
    "write_attempt": "folders",
    "longer": "folders",
    "train_longer": "folders",
    "planned_steps": "folders",
    "problems": "folders",
    "fetch_model": "models",
    "missing_files": "models",
    "read_captions": "dataset",
    "images_in": "dataset",
}


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'runs' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"runs.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
