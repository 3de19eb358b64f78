"""Runs the user's script as `__main__`, as `python SCRIPT ARGS` would, with the hooks in place.

Why not `runpy.run_path`: the script itself is patched too (its trainer class), between its definitions and its
`if __name__ == "__main__":`, and runpy offers no such seam. What the script can see is what python gives it:
`sys.argv`, `sys.path[0]`, `__file__`, its module in `sys.modules["__main__"]`.

A worker that multiprocessing *spawns* is a new interpreter: it would import the script without us. It is told, in
the data that its parent sends (`multiprocessing.spawn.get_preparation_data`), to import `sd_scripts_patches.worker`
as its main module; that puts in the hooks and then does what it was to do in the first place.
"""

from __future__ import annotations

import ast
import json
import multiprocessing.spawn
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from sd_scripts_patches import hooks
from sd_scripts_patches.patch import DoesNotFit

MAIN_VARIABLE = "HANGPROOF_MAIN"
_HOOK = "__hangproof_definitions_are_complete__"


def run_script(script: Path, arguments: list[str]) -> None:
    """Run `script`; whatever it raises, SystemExit included, comes through. Raises FileNotFoundError, DoesNotFit."""
    sys.argv = [str(script), *arguments]
    _enter(str(script.resolve().parent))
    execute(script, "__main__")


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m NAME` would."""
    sys.argv = [name, *arguments]
    _enter(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def execute(script: Path, run_name: str) -> dict:
    """Run the file as module `run_name` and return its namespace. The module's own name (for hooks) is the file's stem."""
    name = script.stem
    tree = hooks.rewrite(ast.parse(script.read_bytes(), filename=str(script)), name)
    if hooks.applies_to(name):
        tree = _with_seam(tree, name)
    module = ModuleType(run_name)
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__, __cached__=None, __spec__=None)
    module.__dict__[_HOOK] = lambda: hooks.patched(module, name)
    if run_name == "__main__":
        sys.modules["__main__"] = module
    exec(compile(tree, str(script), "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def guard_spawned_workers() -> None:
    """From now on, processes that multiprocessing spawns load the patches before anything else."""
    original = multiprocessing.spawn.get_preparation_data
    if getattr(original, "hangproof", False):
        return

    def get_preparation_data(name: str) -> dict:
        data = original(name)
        main = {k: data.pop(k) for k in ("init_main_from_name", "init_main_from_path") if k in data}
        os.environ[MAIN_VARIABLE] = json.dumps(main)
        data["init_main_from_name"] = "sd_scripts_patches.worker"
        return data

    get_preparation_data.hangproof = True
    multiprocessing.spawn.get_preparation_data = get_preparation_data


def become_worker_of(main: dict) -> dict:
    """In a spawned worker: import the parent's main module as multiprocessing would have; returns its namespace."""
    name, path = main.get("init_main_from_name"), main.get("init_main_from_path")
    if name is not None and name != "__main__" and not name.endswith(".__main__"):
        return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    if path is not None and Path(path).suffix == ".py":
        return execute(Path(path), "__mp_main__")
    return {}


def _enter(folder: str) -> None:
    """Make `folder` the first place of imports, as python does for a script; keep our own packages importable."""
    sys.path[0] = folder
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)


def _with_seam(tree: ast.Module, name: str) -> ast.Module:
    """The tree with a call to the patches right before its `if __name__ == "__main__":`."""
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.If) and any(
            isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)
        ):
            call = ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), [], []))
            tree.body.insert(index, call)
            return ast.fix_missing_locations(tree)
    raise DoesNotFit(f'{name}: no `if __name__ == "__main__":` to patch its definitions before')
