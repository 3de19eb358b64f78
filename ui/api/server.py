"""Serves the API under `/api`: a Gradio app of its own, beside the page.

Decision: its endpoints are not in the page's config, which each visit downloads, and it is built by the first request
to it, so that it costs neither the page's start nor an idle server anything. `gradio_client` works as with any Gradio
app: `Client("http://127.0.0.1:7860/api/", headers=…)`, with the token (ui/token.py). With `--mcp` its endpoints are
also tools of an MCP server (`/api/gradio_api/mcp/`).
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from presets import PresetError
from runs.files import RunError
from runs.paths import datasets_dir, outputs_dir
from ui.mount import mounted
from ui.token import bearer

if TYPE_CHECKING:
    import gradio as gr

PATH = "/api"
TITLE = "Hangproof API"
# As in the README.
CLIENT = """from pathlib import Path
from gradio_client import Client

token = Path("~/.config/hangproof/token").expanduser().read_text()
client = Client("http://127.0.0.1:7860/api/", headers={"Authorization": f"Bearer {token}"})
"""
ABOUT = f"""# {TITLE}

From images to a LoRA with named endpoints; the page and the commands do the rest (docs/api.md). With Python:

```py
{CLIENT}for run in client.predict(api_name="/list_runs"):
    print(run["name"], run["state"], run["step"])
```

An action that cannot be done raises an error that says what to do. The link “Use via API” below lists the endpoints, each with
its types, for Python, JavaScript and curl.
"""
MCP_MISSING = "--mcp needs the package mcp; install it with: .venv/bin/python -m pip install 'gradio[mcp]=={version}'"


def endpoints() -> dict[str, Callable[..., Any]]:
    """The public functions of ui/api/runs.py and drafts.py by name."""
    from ui.api import drafts, runs

    own = (one for module in (runs, drafts) for one in vars(module).values() if _is_of(one, module.__name__))
    return {one.__name__: checked(one) for one in own}


def _is_of(one: object, module: str) -> bool:
    return inspect.isfunction(one) and one.__module__ == module and not one.__name__.startswith("_")


def build() -> "gr.Blocks":
    """The Gradio app."""
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        gr.Markdown(ABOUT)
        for name, function in endpoints().items():
            gr.api(function, api_name=name, api_description=inspect.getdoc(function), queue=True)
    return blocks


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gets only values of the types it names, and whose answer is plain; its errors reach the client."""
    import gradio as gr
    from pydantic import ValidationError, validate_call

    validated = validate_call(config={"strict": True})(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return _without_files(validated(*args, **kwargs))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            text = f"{function.__name__}{inspect.signature(function)}: {where}: {first['msg']}"
            raise gr.Error(text, print_exception=False) from error
        except (RunError, PresetError) as error:
            raise gr.Error(str(error), print_exception=False) from error

    return call


def _without_files(value: Any) -> Any:
    """An answer in which no object has the key "path": gradio_client takes such an object for a file and downloads it."""
    if isinstance(value, dict):
        return {"file" if key == "path" else key: _without_files(one) for key, one in value.items()}
    return [_without_files(one) for one in value] if isinstance(value, list | tuple) else value


def api_app(max_upload: int, mcp: str, token: str | None) -> ASGIApp:
    """The API as an ASGI application, below PATH. mcp: the server's own address where it also serves tools; else ""."""
    folders = [str(outputs_dir()), str(datasets_dir())]
    blocks = build()
    app = mounted(blocks, PATH, max_upload, mcp_server=bool(mcp), footer_links=["api"], allowed_paths=folders)
    if mcp:
        # Gradio's tools call the API over HTTP, at the address in the headers of the first request (gradio/mcp.py,
        # _get_or_create_client): that client would have no token, and could be led to another server.
        blocks.mcp_server_obj._get_or_create_client = functools.cache(lambda: _own_client(f"{mcp}{PATH}/", token))
    return app


def _own_client(address: str, token: str | None) -> Any:
    from gradio_client import Client

    return Client(
        address,
        headers={"x-gradio-user": "mcp", **bearer(token)},
        download_files=False,
        verbose=False,
        analytics_enabled=False,
        _skip_components=False,
    )


def check_mcp() -> None:
    """Check that the MCP server can run. Raises RunError: its package is missing."""
    import importlib.util

    if importlib.util.find_spec("mcp") is None:
        from importlib.metadata import version

        raise RunError(MCP_MISSING.format(version=version("gradio")))


class OnDemand:
    """ASGI application that passes requests below PATH to the API, which the first of them builds, and all others on."""

    def __init__(self, app: ASGIApp, make: Callable[[], ASGIApp]) -> None:
        self.app, self.make = app, make
        self._api: ASGIApp | None = None
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] == PATH or scope["path"].startswith(f"{PATH}/")):
            await (await self._started())(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _started(self) -> ASGIApp:
        async with self._lock:
            if self._api is None:
                api = await asyncio.to_thread(self.make)
                ready = asyncio.Event()
                self._running = asyncio.create_task(_run(api, ready))
                await ready.wait()
                self._api = api
        return self._api


async def _run(api: Any, ready: asyncio.Event) -> None:
    """Keep an application's lifespan open; what starts in it (the queue, the MCP server) runs until the server ends."""
    async with api.router.lifespan_context(api):
        ready.set()
        await asyncio.Event().wait()
