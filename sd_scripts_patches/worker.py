"""The main module of a process that multiprocessing spawned from a patched one: hooks first, then the parent's main.

multiprocessing runs it under the name `__mp_main__` (see runner.py). Pickled objects of the parent's `__main__` are
looked up in its globals.
"""

import json
import os
from pathlib import Path

from sd_scripts_patches import compatibility, hooks, registry, runner

_variable = os.environ.get(hooks.CHECKOUT_VARIABLE)
_checkout = compatibility.find_checkout(Path(_variable)) if _variable else None
_patches = registry.patches(_checkout.trainer) if _checkout else registry.patches()
for _patch in _patches:
    if _patch.prepare is not None:
        _patch.prepare(True)
hooks.install(_patches, _checkout.source if _checkout else None)
runner.patch_spawned_workers()
_namespace = runner.import_parent_main(json.loads(os.environ[runner.MAIN_VARIABLE]))
globals().update({k: v for k, v in _namespace.items() if k not in ("__name__", "__builtins__")})
