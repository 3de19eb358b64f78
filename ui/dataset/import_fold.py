"""The fold "Add a folder on the server": starts an import, and shows what the imports of a draft do (imports.py), large ZIPs among them."""

from typing import Any

import gradio as gr

from monitor.phrases import count
from ui.dataset import imports
from ui.html import esc
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

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

    def look() -> tuple[bool, str]:
        now = imports.status(draft_id)
        return now["waiting"] > 0, shown(now)

    def begin(text: str) -> None:
        imports.start_folder(draft_id, text)

    path = gr.Textbox(
        label="Folder on the server", info=ABOUT, placeholder="/home/me/photos", max_lines=1, interactive=True
    )
    start = gr.Button("Import", size="sm", scale=0, min_width=110, elem_id="import-start")
    more = [(path.submit, begin)]  # several imports wait for each other: nothing is hidden
    state = fold.job(start, begin, look, lambda: imports.cancel(draft_id), "import", [path], hides=[], more=more)
    state.change(None, None, None, js=settings.SHOW_NEW, **QUIET)
