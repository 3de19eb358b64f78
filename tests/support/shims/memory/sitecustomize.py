"""Makes the machine's memory look as a file says: `FAULTS_MEMINFO`, as /proc/meminfo. First on PYTHONPATH.

As long as the file does not exist, it is the real one. Every process of the run reads it, the training too.
"""

import os
import sys


class _Meminfo:
    """In place of the path of /proc/meminfo in guards/memory.py."""

    def __init__(self, fake, real):
        self.fake, self.real = fake, real

    def read_text(self):
        return (self.fake if self.fake.exists() else self.real).read_text()


def _install(path):
    from importlib.abc import MetaPathFinder
    from importlib.machinery import PathFinder
    from pathlib import Path

    class Finder(MetaPathFinder):
        """Changes guards.memory when it is imported, and imports nothing before."""

        def find_spec(self, name, folders, target=None):
            if name != "guards.memory":
                return None
            spec = PathFinder.find_spec(name, folders, target)
            if spec is not None:
                execute = spec.loader.exec_module

                def exec_module(module):
                    execute(module)
                    module.MEMINFO = _Meminfo(Path(path), module.MEMINFO)

                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


if "FAULTS_MEMINFO" in os.environ:
    _install(os.environ["FAULTS_MEMINFO"])
