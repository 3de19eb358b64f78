"""Makes the machine's memory look as a file says: `FAULTS_MEMINFO`, as /proc/meminfo. First on PYTHONPATH.

As long as the file does not exist, it is the real one. Every process of the run reads it, the training too.
"""

import os

if "FAULTS_MEMINFO" in os.environ:
    from pathlib import Path

    def read_text(self, *args, real=Path.read_text, fake=Path(os.environ["FAULTS_MEMINFO"]), **named):
        return real(fake if str(self) == "/proc/meminfo" and fake.exists() else self, *args, **named)

    Path.read_text = read_text
