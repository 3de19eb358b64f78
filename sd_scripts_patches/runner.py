"""Runs the user's script as `__main__`, as `python SCRIPT ARGS` does, with the hooks installed.

Why not `runpy.run_path`: the script itself is patched too (its trainer class), between its definitions and its
`if __name__ == "__main__":`, and runpy has no hook there. The script sees what Python shows it: `sys.argv`,
`sys.path[0]`, `__file__` and its module in `sys.modules["__main__"]`.

A worker that multiprocessing *spawns* (or starts from its fork server) is a new interpreter and imports the script
without us. The data that its parent sends (`multiprocessing.spawn.get_preparation_data`) therefore names
`sd_scripts_patches.worker` as its main module. That module installs the hooks and then imports the original main module.
"""

from __future__ import annotations

import ast
import json
import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sd_scripts_patches import hooks
from sd_scripts_patches.patch import Incompatible

before_main: Callable[[], None] | None = None
"""Called once, when the script has imported its modules and defined everything, right before its main part."""
MAIN_VARIABLE = "HANGPROOF_MAIN"
_HOOK = "__hangproof_definitions_are_complete__"


def run_script(script: Path, arguments: list[str], checkout: Path | None = None) -> None:
    """Run `script`, whose modules are named from `checkout`. What it raises, SystemExit included, is not caught."""
    sys.argv = [str(script), *arguments]
    _set_import_path(str(script.resolve().parent))
    _add_source(checkout)
    execute(script, "__main__")


def run_module(name: str, arguments: list[str], checkout: Path | None = None) -> None:
    """Run a module as `python -m NAME` does."""
    sys.argv = [name, *arguments]
    _set_import_path(os.getcwd())
    _add_source(checkout)
    _begin()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def execute(script: Path, run_name: str) -> dict[str, Any]:
    """Run the file as module `run_name`; return its namespace. Hooks know it by the name that an import of it has."""
    name = hooks.module_name(script)
    tree = hooks.rewrite(ast.parse(script.read_bytes(), filename=str(script)), name)
    if hooks.applies_to(name):
        tree = _insert_hook(tree, name)
    module = ModuleType(run_name)
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__, __cached__=None, __spec__=None)

    def complete() -> None:
        hooks.apply_to(module, name)
        if run_name == "__main__":
            _begin()

    module.__dict__[_HOOK] = complete
    if run_name == "__main__":
        sys.modules["__main__"] = module
        if not hooks.applies_to(name):
            _begin()  # no call of `complete` is in it
    exec(compile(tree, str(script), "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _begin() -> None:
    global before_main
    begin, before_main = before_main, None
    if begin is not None:
        begin()


def patch_spawned_workers() -> None:
    """From now on, processes that multiprocessing spawns load the patches before anything else."""
    original = multiprocessing.spawn.get_preparation_data
    if getattr(original, "hangproof", False):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        main = {k: data.pop(k) for k in ("init_main_from_name", "init_main_from_path") if k in data}
        os.environ[MAIN_VARIABLE] = json.dumps(main)
        data["init_main_from_name"] = "sd_scripts_patches.worker"
        return data

    get_preparation_data.hangproof = True  # type: ignore[attr-defined]
    multiprocessing.spawn.get_preparation_data = get_preparation_data


def import_parent_main(main: dict[str, str | None]) -> dict[str, Any]:
    """In a spawned worker: import the parent's main module as multiprocessing does, and return its namespace."""
    name, path = main.get("init_main_from_name"), main.get("init_main_from_path")
    if name is not None and name != "__main__" and not name.endswith(".__main__"):
        return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    if path is not None and Path(path).suffix == ".py":
        return execute(Path(path), "__mp_main__")
    return {}


def _set_import_path(folder: str) -> None:
    """Put `folder` first on the import path, as Python does for a script; our own packages stay importable."""
    sys.path[0] = folder
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)


def _add_source(source: Path | None) -> None:
    """Make the modules of the checkout importable where its scripts lie elsewhere (musubi-tuner's `src`)."""
    if source is not None and str(source) not in sys.path[:1]:
        sys.path.insert(1, str(source))


def _insert_hook(tree: ast.Module, name: str) -> ast.Module:
    """Return the tree with a call that applies the patches right before its `if __name__ == "__main__":`."""
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.If) and any(
            isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)
        ):
            call = ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), [], []))
            tree.body.insert(index, call)
            return ast.fix_missing_locations(tree)
    raise Incompatible(f'{name}: there is no `if __name__ == "__main__":`; patches are applied right before it')
