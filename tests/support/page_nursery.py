"""The process that forks the page's servers (nursery.py): `app.py` with everything imported that serves the page.

Nothing is built before the fork, so a server reads its own environment. What is read at import is made good in it: the
search path for modules, and huggingface_hub, which is imported again where it is used.
"""

import gc
import importlib
import os
import random
import sys
import threading
import time
from pathlib import Path

from nursery import serve

ROOT = Path(__file__).resolve().parents[2]


# What app.py imports until its page has responded.
IMPORTED = """pydantic.v1 starlette.middleware.cors uvicorn.lifespan.on uvicorn.loops.auto uvicorn.protocols.http.auto
    presets ui.api.server ui.dataset.draft ui.login ui.page ui.security"""


def main() -> int:
    """Become a server for each request."""
    sys.path[0] = str(ROOT)
    import app

    os.environ.update(app.GRADIO_ENV)
    for name in IMPORTED.split():
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread does not survive a fork"
    gc.collect()
    gc.freeze()
    argv = serve()
    random.seed()
    time.tzset()
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["app.py", *argv]
    return app.main(argv)


if __name__ == "__main__":
    sys.exit(main())
