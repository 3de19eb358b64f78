""" "Write captions" in step 1: the form, and how far the job is (ui/dataset/captioning.py)."""

from typing import Any

import gradio as gr

from captions import endpoint, models
from ui.dataset import captioning, draft, draft_store
from ui.html import duration, esc
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

LEAST_LEFT_S = 5  # of an estimate that is shown
ENGINES = {
    "florence": ("Florence-2", "Sentences. Runs on this machine."),
    "tagger": ("Tagger", "Danbooru tags, for anime and illustrations. Runs on this machine."),
    "endpoint": ("Server", "Any server with OpenAI's API: Ollama, LM Studio, vLLM, or a provider."),
}
TASKS = [("One short sentence", "short"), ("A few sentences", "detailed"), ("A paragraph", "long")]
WHICH = {"empty": "Images without a caption", "model": "Also captions that a model wrote", "all": "All images"}
THRESHOLDS, FRAME = ("general", "character"), ("prefix", "suffix")
ENDED = {
    "done": "Finished.",
    "failed": "Stopped.",
    "cancelled": "Cancelled.",
    "lost": "Interrupted, for example because the machine restarted.",
}


def shown(status: dict[str, Any]) -> str:
    """How far a job is, as markup; "" where there was none."""
    if not status["state"]:
        return ""
    busy, done, total = status["state"] == "running", status["done"], status["total"]
    counted = f"{done:,} of {total:,} captions written"
    left = status["seconds"] / done * (total - done) if done else 0
    counted += f", about {duration(left)} left" if busy and left >= LEAST_LEFT_S else ""
    bar = f'<progress aria-label="Captions written" max="{max(1, total)}" value="{done}"></progress>' if busy else ""
    bar += f"<p>{esc(status['line'])}</p>" if busy and status["line"] else ""
    failed = "".join(f"<li>{esc(line)}</li>" for line in status["failures"])
    many = len(status["failures"])
    title = "1 image has no caption" if many == 1 else f"{many} images have no caption"
    failures = f"<details><summary>{title}</summary><ul>{failed}</ul></details>" if failed else ""
    said = f"{counted}." if busy else f"{ENDED.get(status['state'], status['state'])} {counted}."
    return fold.note(said) + bar + fold.note(status["error"], True) + failures


def _counts(draft_id: str) -> tuple[list[tuple[str, str]], int]:
    """The choices of images with their numbers, and the captions that no model wrote."""
    entries = draft_store.read(draft_id)["images"].values()
    authors = [entry["caption_by"] if entry["caption"].strip() else "" for entry in entries]
    number = {"empty": authors.count(""), "all": len(authors)}
    number["model"] = number["empty"] + authors.count("model")
    choices = [(f"{label} ({number[key]:,})", key) for key, label in WHICH.items()]
    return choices, authors.count("person") + authors.count("file")


def _about(engine: str, key: str) -> str:
    row = next((one for one in models.of_engine(engine) if one.key == key), None)
    if row is None:
        return ""
    here = models.present(row) is not None
    size = "on this machine" if here else f"downloads about {row.size_mb:,} MB from Hugging Face"
    return f"{row.note} {row.licence}; {size}."


def _models(engine: str, last: dict[str, Any]) -> gr.Dropdown:
    """The models of an engine; a folder is typed into the same field."""
    choices = [(one.name, one.key) for one in models.of_engine(engine)]
    value = last["model"] if last.get("engine") == engine and last.get("model") else choices[0][1]
    model = gr.Dropdown(
        choices,
        value=value,
        allow_custom_value=True,
        label="Model",
        info=_about(engine, value) or "Or type the path of a folder with a model",
        interactive=True,
    )
    model.change(lambda key: gr.update(info=_about(engine, key or "")), model, model, **QUIET)
    return model


def _text(
    label: str, value: str, info: str | None = None, placeholder: str | None = None, lines: int = 1
) -> gr.Textbox:
    return gr.Textbox(value, label=label, info=info, placeholder=placeholder, lines=lines, interactive=True)


def _number(label: str, value: float, info: str | None = None) -> gr.Number:
    return gr.Number(value, label=label, info=info, step=0.01, interactive=True)


def draw(draft_id: str) -> None:
    """Make the components of the fold."""
    found, status = captioning.stored(draft_id), captioning.status(draft_id)
    (choices, _), trigger = _counts(draft_id), draft.trigger(draft_id)
    last = found["options"] if found else {}
    engine_now = last.get("engine", "florence")
    fields: dict[tuple[str, str], Any] = {}  # (the engine, "" for each of them; an option of `python -m captions`)
    with gr.Column() as form:
        engines, about = [(label, key) for key, (label, _) in ENGINES.items()], ENGINES[engine_now][1]
        engine = gr.Radio(engines, value=engine_now, label="Written by", info=about, interactive=True)
        with gr.Row(elem_classes="hp-fields", visible=engine_now == "florence") as florence:
            fields["florence", "model"] = _models("florence", last)
            known = last.get("task") or "detailed"
            fields["florence", "task"] = gr.Dropdown(TASKS, value=known, label="Length", interactive=True)
        with gr.Row(elem_classes="hp-fields", visible=engine_now == "tagger") as tagger:
            fields["tagger", "model"] = _models("tagger", last)
            with gr.Column():
                about = "Tags at least this probable are written"
                fields["tagger", "general"] = _number("Threshold", last.get("general", 0.35), about)
                fields["tagger", "character"] = _number("Threshold of characters", last.get("character", 0.85))
            with gr.Column():
                some_tags = "Tags, separated by commas", "simple background, solo"
                fields["tagger", "without"] = _text("Leave out", last.get("without", ""), *some_tags)
                keeps = last.get("underscores", False)
                fields["tagger", "underscores"] = gr.Checkbox(keeps, label="Keep underscores in tags", interactive=True)
        with gr.Column(visible=engine_now == "endpoint") as server:
            with gr.Row(elem_classes="hp-fields"):
                scaled = "Each image is sent there, scaled down to 1,024 pixels"
                fields["endpoint", "url"] = _text("Address", last.get("url", ""), scaled, captioning.PLACEHOLDER)
                own = last.get("model", "") if engine_now == "endpoint" else ""
                fields["endpoint", "model"] = _text("Model", own, placeholder="qwen2.5vl:7b")
                about = "The name of an environment variable that Hangproof was started with. Empty: no key"
                known = last.get("key_variable", "")
                fields["endpoint", "key_variable"] = _text("Variable with the API key", known, about, "OPENAI_API_KEY")
            fields["endpoint", "prompt"] = _text("Instruction", last.get("prompt") or endpoint.PROMPT, lines=3)
        with gr.Row(elem_classes="hp-fields"):
            fields["", "prefix"] = _text("Text before each caption", last.get("prefix", ""))
            fields["", "suffix"] = _text("Text after each caption", last.get("suffix", ""))
        word = f"Put the trigger word “{trigger}” first" if trigger else "Put the trigger word first"
        first = gr.Checkbox(bool(trigger), label=word, interactive=bool(trigger))
        which = gr.Radio(choices, value="empty", label="For", interactive=True)
        some = gr.Checkbox(True, label="Only the selected images, if some are selected", interactive=True)
        over = gr.Checkbox(False, visible=False, interactive=True)
        with gr.Row(elem_classes="hp-actions"):
            go = gr.Button("Write captions", variant="primary", elem_id="write-captions", scale=0, min_width=160)
            resume = gr.Button("Continue", visible=_unfinished(status), scale=0, min_width=110)
        ids = gr.HTML(html_template="", elem_id="caption-ids")

    def look() -> tuple[bool, str]:
        now = captioning.status(draft_id)
        return now["state"] == "running", shown(now)

    def on_engine(name: str) -> list[Any]:
        return [gr.update(info=ENGINES[name][1]), *(gr.update(visible=name == key) for key in ENGINES)]

    def on_which(name: str) -> dict[str, Any]:
        number = _counts(draft_id)[1]
        label = f"Replace captions that I wrote or that came from files ({number:,})"
        return gr.update(visible=name == "all" and number > 0, label=label)

    def on_new_captions(name: str) -> list[Any]:
        unfinished = gr.update(visible=_unfinished(captioning.status(draft_id)))
        return [gr.update(choices=_counts(draft_id)[0]), on_which(name), unfinished]

    def on_go(engine: str, which: str, some: bool, over: bool, first: bool, *values: Any) -> None:
        *typed, selected = values
        options: dict[str, Any] = {"engine": engine, "trigger": draft.trigger(draft_id) if first else ""}
        for (of, name), value in zip(fields, typed, strict=True):
            if of in ("", engine):
                given = (0 if name in THRESHOLDS else "") if value is None else value
                options[name] = given.strip() if isinstance(given, str) and name not in FRAME else given
        only = [str(one) for one in selected] if some and isinstance(selected, list) and selected else None
        captioning.start(draft_id, options, which, only, over and which == "all")

    chosen = [engine, which, some, over, first, *fields.values(), ids]
    engine.change(on_engine, engine, [engine, florence, tagger, server], **QUIET)
    which.change(on_which, which, over, **QUIET)
    more = [(resume.click, lambda *_: captioning.resume(draft_id))]
    state = fold.job(
        go, on_go, look, lambda: captioning.cancel(draft_id), "captions", chosen, settings.CHOSEN, [form], more
    )
    state.change(on_new_captions, which, [which, over, resume], **QUIET)
    state.change(None, None, None, js=settings.SHOW_NEW, **QUIET)


def _unfinished(status: dict[str, Any]) -> bool:
    return status["state"] not in ("", "running") and status["done"] < status["total"]
