"""The syntax trees of the modules that are patched."""

import children

THREADS = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sd_scripts_patches import locate
gc.callbacks.append(lambda *about: sum(range(500)))  # Python code while a tree is built, where threads change
gc.set_threshold(50)
sys.setswitchinterval(1e-6)
files = 2 * sorted(Path("sd_scripts_patches").glob("*.py"))
with ThreadPoolExecutor(4) as pool:
    print(len(list(pool.map(locate.parse_uncached, files))) == len(files))
"""


def test_files_are_parsed_by_several_threads_at_once():
    """Python 3.11 raises SystemError when two threads build syntax trees at the same time."""
    done = children.run(THREADS)
    assert done.stdout == "True\n", done.stderr[-2000:]
