"""Serves the page, and the API under `/api`: a Gradio app each, in one application.

Decision: the endpoints of the API are not in the page's config, which each visit downloads. `gradio_client` works as with any Gradio
app: `Client("http://127.0.0.1:7860/api/", headers=…)`, with the token (ui/token.py). With `--mcp` its endpoints are
also tools of an MCP server (`/api/gradio_api/mcp/`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr
from fastapi import FastAPI
from gradio.processing_utils import async_move_files_to_cache
from gradio.route_utils import FnIndexInferError
from pydantic import ValidationError, validate_call
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from presets import PresetError
from runs.files import RunError
from runs.paths import datasets_dir, outputs_dir
from ui.token import bearer

# How often Gradio's queue looks for events, and for the progress of those that run (the page shows none). At its own
# one and ten milliseconds, a page that nobody uses takes 1.5 % of a core.
LOOK_S, PROGRESS_S = 0.05, 0.5
SESSIONS = 300  # visits whose state Gradio keeps: 0.3 MB each, of 10,000 where nothing is said
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


def mount(app: FastAPI, blocks: gr.Blocks, path: str, max_upload: int, **options: Any) -> None:
    """Let an application serve `blocks` at a path.

    Args:
        max_upload: bytes of a file. options: further ones of gr.mount_gradio_app.
    """
    blocks.state_session_capacity = SESSIONS
    errors = UNUSABLE if path == PATH else {UnicodeDecodeError: unusable}
    gr.mount_gradio_app(
        app,
        blocks,
        path,
        app_kwargs={"openapi_url": None, "exception_handlers": errors},
        show_error=True,
        max_file_size=max_upload,
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        run_history=False,
        allowed_paths=[str(outputs_dir()), str(datasets_dir())],
        **options,
    )
    # Gradio checks which files an event names only after launch() (processing_utils.py, _check_allowed).
    blocks.has_launched = True
    blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free = LOOK_S, PROGRESS_S


def unusable(request: Request, error: Exception) -> Response:
    """The answer to a request that no endpoint can take. Gradio itself prints a traceback and says nothing."""
    text = f"{request.url.path} cannot take this request: {error}. {PATH}/ lists the endpoints with their parameters."
    return JSONResponse({"error": text}, 400)


# What Gradio's routes raise where an endpoint or a parameter does not exist, or a body cannot be read.
UNUSABLE = dict.fromkeys((FnIndexInferError, LookupError, TypeError, ValueError), unusable)


class Endpoints(gr.Blocks):
    """The Gradio app of the API."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *_: Any) -> list[Any]:
        """The arguments of a call, with the defaults of those it leaves out, which only Gradio's own clients add."""
        signature = inspect.signature(block_fn.fn)
        try:
            given = signature.bind(*inputs)
            given.apply_defaults()
            return await async_move_files_to_cache(list(given.args), self.children[0], check_in_upload_folder=True)
        except (TypeError, ValueError, OSError) as error:  # such as a file that was not uploaded
            raise gr.Error(f"{block_fn.fn.__name__}{signature}: {error}", print_exception=False) from error


def endpoints() -> dict[str, Callable[..., Any]]:
    """The public functions of ui/api/runs.py and drafts.py by name."""
    from ui.api import drafts, runs

    found = [one for module in (runs, drafts) for one in vars(module).values() if inspect.isfunction(one)]
    own = [one for one in found if one.__module__ in (runs.__name__, drafts.__name__) and one.__name__[0] != "_"]
    return {one.__name__: checked(one) for one in own}


def build() -> Endpoints:
    """The Gradio app."""
    with Endpoints(title=TITLE, analytics_enabled=False, delete_cache=(3600, 86400)) as blocks:
        gr.Markdown(ABOUT)
        for name, function in endpoints().items():
            gr.api(function, api_name=name, api_description=inspect.getdoc(function), queue=True)
    return blocks


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gets only values of its types, and whose answer is plain; its errors reach the client."""
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
    """An answer in which no object has the key "path": gradio_client would download it as a file."""
    if isinstance(value, dict):
        return {"file" if key == "path" else key: _without_files(one) for key, one in value.items()}
    return [_without_files(one) for one in value] if isinstance(value, list | tuple) else value


def add(app: FastAPI, max_upload: int, mcp: str, token: str | None) -> None:
    """Add the API to an application, below PATH. mcp: the server's own address where it also serves tools; else ""."""
    blocks = build()
    mount(app, blocks, PATH, max_upload, mcp_server=bool(mcp), footer_links=["api"])
    if mcp:
        # Gradio's tools call the API over HTTP, at the address in the headers of the first request (gradio/mcp.py,
        # _get_or_create_client): that client would have no token, and could be led to another server.
        blocks.mcp_server_obj._get_or_create_client = functools.cache(lambda: _own_client(f"{mcp}{PATH}/", token))


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
