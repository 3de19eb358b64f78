"""The part of a run that publishes its LoRA on Hugging Face.

`python -m launch publish` does it, in a process of its own (ui/jobs.py) that outlives the page.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from launch import publish
from runs.files import RunError
from ui import jobs
from ui.html import box, duration, esc, linked
from ui.run import fold
from ui.run.fold import QUIET

JOB = "publish"
LIMIT_S = 6 * 3600.0
MOST_SAMPLES = 12
NO_TOKEN = (
    "You are not logged in to Hugging Face. Log in under “Hugging Face account” in the tab New LoRA, with a token that "
    "may write, then open this part again."
)
ENDED = {"failed": "Not published", "cancelled": "Cancelled", "lost": "Interrupted; publish again to continue"}


def start(folder: Path, options: dict[str, Any]) -> None:
    """Publish a run's LoRA in the background. options: by the name of the command's option.

    Raises:
        LaunchError: a choice is wrong. RunError: nobody is logged in, or it is being published already.
    """
    if not publish.choices(folder)["token"]:
        raise RunError(NO_TOKEN)
    publish.preview(folder, options)
    words = ["launch", "publish", str(folder), "--json"]
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        text = "" if value is None else str(value).strip()
        words += [flag] * value if isinstance(value, bool) else [f"{flag}={text}"]
    jobs.start(folder, JOB, words, LIMIT_S)


def progress(folder: Path) -> tuple[bool, str]:
    """(whether it is being published, what the page shows of it as HTML)."""
    job, before = jobs.read(folder, JOB), publish.published(folder)
    about = f"{linked(before['url'])} ({esc(before['lora'])}, {esc(before['utc'])})" if before else ""
    done = f'<div class="hp-say" role="status" data-testid="published">Published: {about}</div>' if about else ""
    if job is None or job.state == "done":
        return False, done
    if job.state == "running":
        lines = (jobs.output(folder, JOB)[0] or "").strip().splitlines()
        now = f"{esc(lines[-1]) if lines else 'Preparing the files…'} ({duration(job.seconds)})"
        return True, f'<div class="hp-say" role="status" data-testid="publishing">{now}</div>'
    return False, box([linked(jobs.reason(folder, JOB, ""))], "bad", ENDED[job.state]) + done


def draw(folder: Path) -> None:
    """Make the components of the part."""
    known = publish.choices(folder)
    if not known["loras"]:
        fold.say("This run has no LoRA yet. Open this part again when it has one.")
        return
    if not known["token"]:
        fold.say(NO_TOKEN)
    fields: dict[str, Any] = {}  # by the name of the command's option

    # interactive=True: Gradio finds out by the page's first config which fields can be edited, and these are not in it.
    def add(kind: Callable[..., Any], key: str, value: Any, label: str, info: str, **more: Any) -> None:
        fields[key] = kind(
            value=value, label=label, info=info, interactive=True, **fold.of_run(folder, f"publish-{key}"), **more
        )

    def files() -> list[tuple[str, str]]:
        found = publish.choices(folder)["loras"]
        return [(f"{one['name']} ({one['at']}, {one['bytes'] / 1e6:.1f} MB)", one["name"]) for one in found]

    licence, licences = known["licence"] or None, [(label, key) for key, label in known["licences"].items()]
    repo = (known["published"] or {}).get("repo", known["repo"])
    with gr.Row(elem_classes="hp-fields"):
        add(gr.Textbox, "repo", repo, "Repository", "A name, or OWNER/NAME for an organization", max_lines=1)
        add(gr.Dropdown, "lora", known["loras"][0]["name"], "LoRA", "The file that is published", choices=files())
        add(gr.Dropdown, "licence", licence, "Licence", "Usually that of the base model", choices=licences)
    with gr.Row(elem_classes="hp-fields"):
        about = "Its Hugging Face id, OWNER/NAME; the card links to it"
        add(gr.Textbox, "title", known["title"], "Title", "The card's heading", max_lines=1)
        add(gr.Textbox, "base_model", known["base_model"], "Base model", about, max_lines=1)
        add(gr.Slider, "samples", publish.SAMPLES, "Sample images", "Shown on the card", maximum=MOST_SAMPLES, step=1)
    add(gr.Textbox, "description", "", "Description", "Shown on the card; Markdown works", lines=3)
    with gr.Row(elem_classes="hp-fields"):
        add(gr.Checkbox, "public", False, "Public", "Everyone can see it; otherwise only you")
        add(gr.Checkbox, "replace_card", False, "Replace a card that was written by hand", "If the repository has one")
    with gr.Row(elem_classes="hp-actions"):
        send = gr.Button("Publish", variant="primary", elem_id="publish", scale=0, min_width=140)
        look = gr.Button("Preview the card", elem_id="publish-preview", scale=0, min_width=160)
    said = gr.HTML(apply_default_css=False)
    card = gr.Textbox(
        visible=False, label="The card", lines=12, max_lines=30, interactive=False, elem_id="publish-card"
    )

    def on_send(*values: Any) -> None:
        start(folder, dict(zip(fields, values, strict=True)))

    def on_look(*values: Any) -> list[Any]:
        try:
            text = publish.preview(folder, dict(zip(fields, values, strict=True)))
            return [gr.update(visible=True, value=text), ""]
        except fold.ERRORS as error:
            return [gr.update(visible=False), fold.note(error, True)]

    inputs = [*fields.values()]
    lora = fields["lora"]
    lora.focus(lambda: gr.update(choices=files()), None, lora, **QUIET)  # also those saved since it was opened
    look.click(on_look, inputs, [card, said], **QUIET)
    fold.job(send, on_send, lambda: progress(folder), lambda: jobs.cancel(folder, JOB), "publish", inputs)
