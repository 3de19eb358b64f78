"""The fold "Add a folder on the server": starts an import, and shows what the imports of a draft do (imports.py), large ZIPs among them."""

from typing import Any

import gradio as gr

from monitor.phrases import count
from runs.files import RunError
from ui.dataset import imports
from ui.html import esc
from ui.new import settings
from ui.run import fold
from ui.run.fold import IDLE_S, QUIET, TICK_S

ABOUT = "Images in the folder and its subfolders are added with their captions. The folder is only read."
PHASES = {"starting": "Starting", "reading": "Reading the folder", "unpacking": "Unpacking", "adding": "Adding images"}
ENDED = {
    "done": "{images} added from {name}.",
    "cancelled": "Import of {name} cancelled; {images} added. Undo removes them.",
    "failed": "{name}: not imported completely; {images} added.",
}


def shown(status: dict[str, Any]) -> str:
    """The import that runs and the results of those before it, as markup."""
    text = ""
    if now := status["now"]:
        done, total = now["done"], now["total"]
        far = f" {done:,} of" if now["phase"] == "adding" else ""
        far += f" {count(total, 'file')}" if total else ""
        queued = f" · {count(status['waiting'] - 1, 'import')} after it" if status["waiting"] > 1 else ""
        text = fold.note(f"{PHASES.get(now['phase'], 'Importing')}:{far} · {now['name']}{queued}")
        value = f' max="{total}" value="{done}"' if now["phase"] == "adding" and total else ""
        text += f'<progress aria-label="Import"{value}></progress>'
    for one in status["finished"]:
        ended = ENDED[one["state"]].format(name=one["name"], images=count(one["added"], "image"))
        messages = "".join(f"<li>{esc(line)}</li>" for line in one["messages"])
        text += fold.note(ended, one["state"] == "failed") + (f"<ul>{messages}</ul>" if messages else "")
    return text


def draw(draft_id: str) -> None:
    """Make the components of the fold."""

    def current() -> list[Any]:
        now = imports.status(draft_id)
        busy = now["waiting"] > 0
        return [shown(now), gr.update(visible=busy), gr.Timer(TICK_S if busy else IDLE_S)]

    def on_start(text: str) -> list[Any]:
        try:
            imports.start_folder(draft_id, text)
        except RunError as error:
            return [fold.note(error, True), *current()]
        return ["", *current()]

    def on_cancel() -> list[Any]:
        imports.cancel(draft_id)
        return current()

    now = imports.status(draft_id)
    busy = now["waiting"] > 0
    path = gr.Textbox(
        label="Folder on the server", info=ABOUT, placeholder="/home/me/photos", max_lines=1, interactive=True
    )
    with gr.Row(elem_classes="hp-actions"):
        start = gr.Button("Import", size="sm", scale=0, min_width=110, elem_id="import-start")
        cancel = gr.Button("Cancel the import", visible=busy, size="sm", scale=0, min_width=110)
    problem = gr.HTML(apply_default_css=False)
    state = gr.HTML(shown(now), elem_id="import-state", apply_default_css=False)
    timer = gr.Timer(TICK_S if busy else IDLE_S)
    changed = [state, cancel, timer]
    gr.on([start.click, path.submit], on_start, path, [problem, *changed], **QUIET)
    cancel.click(on_cancel, None, changed, **QUIET)
    timer.tick(current, None, changed, key="import-tick", **QUIET)
    state.change(None, None, None, js=settings.SHOW_NEW, **QUIET)
