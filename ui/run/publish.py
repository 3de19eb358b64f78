"""The part of a run that publishes its LoRA on Hugging Face.

`python -m launch publish` does it, in a process of its own (ui/jobs.py) that outlives the page.
"""

from pathlib import Path
from typing import Any

import gradio as gr

from launch import publish
from launch.common import LaunchError
from runs.files import RunError
from ui import jobs
from ui.html import duration, esc
from ui.new.hub_login import linked
from ui.run import fold
from ui.run.fold import QUIET

JOB = "publish"
LIMIT_S = 6 * 3600.0
MOST_SAMPLES = 12
NO_TOKEN = (
    "You are not logged in to Hugging Face. Log in under “Hugging Face account” in the tab New LoRA, with a token that may "
    "write, then open this part again."
)
STATES = {
    "done": "Published",
    "failed": "Not published",
    "cancelled": "Cancelled",
    "lost": "Interrupted; publish again to continue",
}
OPTIONS = ("lora", "title", "description", "base_model", "licence", "samples")


def start(folder: Path, repo: str, public: bool, replace_card: bool, options: dict[str, Any]) -> None:
    """Publish a run's LoRA in the background.

    Raises:
        RunError: a choice is wrong, nobody is logged in, or it is being published already.
    """
    if not publish.choices(folder)["token"]:
        raise RunError(NO_TOKEN)
    preview(folder, options)
    words = ["launch", "publish", str(folder), f"--samples={int(options['samples'])}", "--json"]
    words += [f"--{key.replace('_', '-')}={options[key] or ''}" for key in OPTIONS if key != "samples"]
    words += [f"--repo={repo.strip()}", *["--public"] * public, *["--replace-card"] * replace_card]
    jobs.start(folder, JOB, words, LIMIT_S)


def preview(folder: Path, options: dict[str, Any]) -> str:
    """The card as Markdown. Raises RunError."""
    try:
        return publish.preview(folder, options)
    except LaunchError as error:
        raise RunError(str(error)) from error


def progress(folder: Path) -> tuple[bool, str]:
    """(whether it is being published, what the page shows of it as HTML)."""
    job, before = jobs.read(folder, JOB), publish.published(folder)
    link = f"<p>Published: {linked(before['url'])} ({esc(before['lora'])}, {esc(before['utc'])})</p>" if before else ""
    if job is None:
        return False, f'<div class="hp-say">{link}</div>' if link else ""
    text, value, _ = jobs.output(folder, JOB)
    lines = [line for line in (text or "").splitlines() if line.strip()]
    if job.state == "running":
        now = esc(lines[-1]) if lines else "Preparing the files…"
        return True, f'<div class="hp-say" role="status" data-testid="publishing">{now} ({duration(job.seconds)})</div>'
    if job.state == "done":
        url = value.get("url", "") if isinstance(value, dict) else ""
        return False, f'<div class="hp-say" role="status" data-testid="published">Published: {linked(str(url))}</div>'
    return False, (
        f'<div class="hp-problem hp-bad" role="alert" data-testid="not-published"><strong>{STATES[job.state]}</strong>'
        f"<p>{linked(jobs.reason(folder, JOB, ''))}</p>{link}</div>"
    )


def build(selected: gr.State) -> gr.Accordion:
    """Build the part; `selected` has the name of the run."""
    return fold.build("Publish on Hugging Face", "publish-fold", selected, _form)


def _form(folder: Path) -> None:
    known = publish.choices(folder)
    if not known["loras"]:
        fold.say("This run has no LoRA yet.")
        return
    if not known["token"]:
        fold.say(NO_TOKEN)
    before = known["published"] or {}

    # interactive=True: Gradio finds out by the page's first config which fields can be edited, and these are not in it.
    def text(key: str, value: str, label: str, info: str, lines: int = 1) -> gr.Textbox:
        most = {"max_lines": 1} if lines == 1 else {"lines": lines}
        return gr.Textbox(value, label=label, info=info, interactive=True, elem_id=f"publish-{key}", **most)

    def choice(key: str, options: list[tuple[str, str]], value: str | None, label: str, info: str) -> gr.Dropdown:
        return gr.Dropdown(options, value=value, label=label, info=info, interactive=True, elem_id=f"publish-{key}")

    def tick(key: str, label: str, info: str) -> gr.Checkbox:
        return gr.Checkbox(False, label=label, info=info, interactive=True, elem_id=f"publish-{key}")

    files = [(f"{one['name']} ({one['at']}, {one['bytes'] / 1e6:.1f} MB)", one["name"]) for one in known["loras"]]
    licences = [(label, key) for key, label in known["licences"].items()]
    with gr.Row(elem_classes="hp-fields"):
        repo = text("repo", before.get("repo", folder.name), "Repository", "A name, or OWNER/NAME for an organization")
        lora = choice("lora", files, known["loras"][0]["name"], "LoRA", "The file that is published")
        licence = choice("licence", licences, known["licence"] or None, "Licence", "Usually that of the base model")
    with gr.Row(elem_classes="hp-fields"):
        title = text("title", known["title"], "Title", "The card's heading")
        about = "Its Hugging Face id, OWNER/NAME; the card links to it"
        base_model = text("base_model", known["base_model"], "Base model", about)
        samples = gr.Slider(
            0,
            MOST_SAMPLES,
            publish.SAMPLES,
            step=1,
            label="Sample images",
            info="Shown on the card",
            interactive=True,
            elem_id="publish-samples",
        )
    description = text("description", "", "Description", "Shown on the card; Markdown works", lines=3)
    with gr.Row(elem_classes="hp-fields"):
        public = tick("public", "Public", "Everyone can see it; otherwise only you")
        replace = tick("replace", "Replace a card that was written by hand", "If the repository has one")
    with gr.Row(elem_classes="hp-actions"):
        send = gr.Button("Publish", variant="primary", elem_id="publish", scale=0, min_width=140)
        look = gr.Button("Preview the card", elem_id="publish-preview", scale=0, min_width=160)
    said = gr.HTML(apply_default_css=False)
    card = gr.Textbox(
        visible=False, label="The card", lines=12, max_lines=30, interactive=False, elem_id="publish-card"
    )
    options = [lora, title, description, base_model, licence, samples]

    def on_send(repo: str, public: bool, replace: bool, *values: Any) -> None:
        start(folder, repo or "", bool(public), bool(replace), dict(zip(OPTIONS, values, strict=True)))

    def on_look(*values: Any) -> list[Any]:
        try:
            return [gr.update(visible=True, value=preview(folder, dict(zip(OPTIONS, values, strict=True)))), ""]
        except RunError as error:
            return [gr.update(visible=False), fold.note(error, True)]

    look.click(on_look, options, [card, said], **QUIET)
    sending, inputs = fold.Jobs(), [repo, public, replace, *options]
    sending.add(send, on_send, lambda: progress(folder), lambda: jobs.cancel(folder, JOB), "publish", inputs)
    sending.follow()
