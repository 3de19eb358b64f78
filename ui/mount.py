"""How the page and its API are mounted: one Gradio application each, with what both leave out of Gradio."""

from typing import TYPE_CHECKING, Any

from ui import queue_wakes

if TYPE_CHECKING:
    import gradio as gr
    from fastapi import FastAPI


def mounted(blocks: "gr.Blocks", path: str, max_upload: int, **options: Any) -> "FastAPI":
    """An application that serves `blocks` at a path.

    Args:
        max_upload: bytes of a file. options: further ones of gr.mount_gradio_app.
    """
    import gradio as gr
    from fastapi import FastAPI

    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        blocks,
        path,
        app_kwargs={"openapi_url": None},
        show_error=True,
        max_file_size=max_upload,
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        run_history=False,
        **options,
    )
    # Gradio checks which files an event names only after launch() (processing_utils.py, _check_allowed).
    blocks.has_launched = True
    queue_wakes.install(blocks)
    return app
