"""The main module of a process that multiprocessing spawned from a patched one: hooks first, then the parent's main.

Run by multiprocessing itself under the name `__mp_main__` (see runner.py); what it leaves in its globals is what
pickled objects of the parent's `__main__` are looked up in.
"""

import json
import os

from sd_scripts_patches import hooks, registry, runner

_patches = registry.patches()
for _patch in _patches:
    if _patch.prepare is not None:
        _patch.prepare(True)
hooks.install(_patches)
runner.guard_spawned_workers()
_namespace = runner.become_worker_of(json.loads(os.environ[runner.MAIN_VARIABLE]))
globals().update({k: v for k, v in _namespace.items() if k not in ("__name__", "__builtins__")})
