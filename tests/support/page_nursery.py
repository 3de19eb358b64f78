"""The process that forks the page's servers (nursery.py): `app.py` with everything imported that serves the page.

Nothing is built before the fork, so a server reads its own environment. What is read at import is made good in it: the
search path for modules, and huggingface_hub, which is imported again where it is used.
"""

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path

from nursery import serve

ROOT = Path(__file__).resolve().parents[2]


def imports() -> None:
    """What app.py imports until its page has responded."""
    import pydantic.v1  # noqa: F401 - FastAPI's
    import starlette.middleware.cors  # noqa: F401
    import uvicorn.lifespan.on
    import uvicorn.loops.auto
    import uvicorn.protocols.http.auto  # noqa: F401

    import app

    os.environ.update(app.GRADIO_ENV)
    import presets  # noqa: F401
    import ui.api.server
    import ui.dataset.draft
    import ui.login
    import ui.page
    import ui.security  # noqa: F401


def main() -> int:
    """Become a server for each request."""
    sys.path[0] = str(ROOT)
    imports()
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
    import app

    return app.main(argv)


if __name__ == "__main__":
    sys.exit(main())
