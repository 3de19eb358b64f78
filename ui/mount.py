"""How the page and its API are mounted: one Gradio application each, with what both leave out of Gradio."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gradio as gr
    from fastapi import FastAPI

# How often Gradio's queue looks for events, and for the progress of those that run (the page shows none). At its own one and ten
# milliseconds, a page that nobody uses takes 1.5 % of a core.
LOOK_S, PROGRESS_S = 0.05, 0.5


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
    blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free = LOOK_S, PROGRESS_S
    return app
