"""Captions written by a model for a draft, by `python -m ui.dataset.captioning DRAFT`.

The job is a process of its own (ui/jobs.py) that stores each caption in the draft as soon as it is known. So it goes on
when the server or the browser ends, and what it wrote is there when the page is opened again.

The draft says what the job is: its options, and the images that are not done, with the captions that they had. So a job
that was killed continues after the last one. A caption that a person wrote, or that came from a file, is replaced only
where the job says so, and never one that was changed meanwhile.
"""

import secrets
import sys
from collections.abc import Iterable
from typing import Any

from captions import job, models
from captions.options import DEFAULTS, ENGINES, FIELDS, checked, write
from captions.work import Picture
from runs.files import RunError
from ui import jobs
from ui.dataset import draft, draft_store
from ui.dataset.draft_images import Entry
from ui.html import duration, part

JOB = "captions"
LIMIT_S = 14 * 24 * 3600.0
MOST_FAILURES = 20
WHICH = {"empty": "Images without a caption", "model": "Also captions that a model wrote", "all": "All images"}
STEP_IMAGES = 500  # captions that undo brings back at once


def start(draft_id: str, options: dict[str, Any], *chosen: Any) -> int:
    """Start to write captions in the background. Returns the number of images. Args: as begin. Raises RunError: an
    option is not valid, there is nothing to do, or a job runs already."""
    checked(options)
    if running(draft_id):
        raise RunError("Captions are being written already; cancel that first")
    _run(draft_id, lambda: begin(draft_id, options, *chosen))
    return int(draft_store.read(draft_id)["captions"]["total"])


def resume(draft_id: str) -> None:
    """Continue the last job where it ended. Raises RunError: there is none, or it runs already."""
    if (found := stored(draft_id)) is None:
        raise RunError("There are no captions to continue; start them anew")
    checked(found["options"])

    def count_done() -> None:
        with draft.locked(draft_id) as file:
            file.store({**file.state, "captions": {**found, "before": found["total"] - _left(draft_id)}})

    _run(draft_id, count_done)


def _run(draft_id: str, prepare: jobs.Prepare) -> None:
    jobs.start(draft.folder(draft_id), JOB, ["ui.dataset.captioning", draft_id], LIMIT_S, prepare=prepare)


def cancel(draft_id: str) -> None:
    """End the job; the captions so far stay."""
    jobs.cancel(draft.folder(draft_id), JOB)


def running(draft_id: str) -> bool:
    """Whether captions are being written."""
    return jobs.running(draft.folder(draft_id), JOB)


def status(draft_id: str) -> dict[str, Any]:
    """How far the last job is: {"job": its id, "state", "seconds", "before": done when its process began, "done", "total",
    "line", "failed": number of images without a caption, "failures": the last ones, "error"}; state "" without one."""
    folder = draft.folder(draft_id)
    last = jobs.read(folder, JOB)
    if last is None or (found := stored(draft_id)) is None:
        numbers = dict.fromkeys(("seconds", "before", "done", "total", "failed"), 0)
        return {"job": "", "state": "", **numbers, "line": "", "failures": [], "error": ""}
    text, _, errors = jobs.output(folder, JOB)
    lines = [line for line in text.splitlines() if line.strip()]
    failures = [line for line in lines if ": no caption: " in line]
    others = [line for line in lines if line not in failures]
    error = errors.strip().splitlines()
    return {
        "job": found["job"],
        "state": last.state,
        "seconds": round(last.seconds),
        "before": found.get("before", 0),
        "done": found["total"] - _left(draft_id),
        "total": found["total"],
        "line": others[-1] if others else "",
        "failed": len(failures),
        "failures": failures[-MOST_FAILURES:],
        "error": error[-1].removeprefix("captions: ") if error and last.state not in ("running", "done") else "",
    }


# The fold ------------------------------------------------------------------------------------------------------------

LEAST_LEFT_S = 5  # of an estimate that is shown


def shown(status: dict[str, Any]) -> str:
    """How far a job is, as markup; "" where there was none."""
    if not status["state"]:
        return ""
    busy, done, total = status["state"] == "running", status["done"], status["total"]
    here = done - status["before"]  # what a process wrote that has ended says nothing of this one's speed
    left = status["seconds"] / here * (total - done) if here > 0 else 0
    said = f"{done:,} of {total:,} captions written"
    said += f", about {duration(left)} left" if busy and left >= LEAST_LEFT_S else ""
    said = f"{said}." if busy else f"{jobs.ENDED.get(status['state'], status['state'])}. {said}."
    return part("dataset/folds.html", "captions", said, status, busy)


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


def draw(draft_id: str) -> None:
    """Make the components of the fold "Write captions"."""
    import gradio as gr

    from ui.new import form
    from ui.run import fold

    def add(engine: str, name: str, default: Any, kind: str, **more: Any) -> Any:
        """A field with its value of the last job."""
        known = name in last and (name != "model" or engine == engine_now)
        value, rows = last[name] if known else default, models.of_engine(engine)
        if name == "model" and rows:  # the path of a folder is typed into the same field
            value = value or rows[0].key
            info = _about(engine, value) or "Or type the path of a folder with a model"
            more |= {"choices": [(one.name, one.key) for one in rows], "allow_custom_value": True, "info": info}
        field = getattr(gr, kind)(value=value, interactive=True, **more)
        if name == "model" and rows:
            field.change(lambda key: gr.update(info=_about(engine, key or "")), field, field, **fold.QUIET)
        return field

    found, now = stored(draft_id), status(draft_id)
    (choices, _), trigger = _counts(draft_id), draft.trigger(draft_id)
    last = found["options"] if found else {}
    engine_now = last.get("engine", "florence")
    fields: dict[tuple[str, str], Any] = {}
    groups: dict[str, gr.Row] = {}
    with gr.Column() as given:
        engines, about = [(one["label"], key) for key, one in ENGINES.items()], ENGINES[engine_now]["about"]
        engine = gr.Radio(engines, value=engine_now, label="Written by", info=about, interactive=True)
        for group in (*ENGINES, "all"):
            with gr.Row(elem_classes="hp-fields", visible=group in ("all", engine_now)) as groups[group]:
                fields |= {(of, name): add(of, name, **row) for (of, name), row in FIELDS.items() if of == group}
        word = f"Put the trigger word “{trigger}” first" if trigger else "Put the trigger word first"
        first = gr.Checkbox(bool(trigger), label=word, interactive=bool(trigger))
        which = gr.Radio(choices, value="empty", label="For", interactive=True)
        some = gr.Checkbox(True, label="Only the selected images, if some are selected", interactive=True)
        over = gr.Checkbox(False, visible=False, interactive=True)
        with gr.Row(elem_classes="hp-actions"):
            go = gr.Button("Write captions", variant="primary", elem_id="write-captions", scale=0, min_width=160)
            again = gr.Button("Continue", visible=_unfinished(now), scale=0, min_width=110)
        ids = gr.HTML(html_template="", elem_id="caption-ids")

    def look() -> tuple[bool, str]:
        now = status(draft_id)
        return now["state"] == "running", shown(now)

    def on_engine(name: str) -> list[Any]:
        return [gr.update(info=ENGINES[name]["about"]), *(gr.update(visible=name == key) for key in ENGINES)]

    def on_which(name: str) -> dict[str, Any]:
        number = _counts(draft_id)[1]
        label = f"Replace captions that I wrote or that came from files ({number:,})"
        return gr.update(visible=name == "all" and number > 0, label=label)

    def on_new_captions(name: str) -> list[Any]:
        unfinished = gr.update(visible=_unfinished(status(draft_id)))
        return [gr.update(choices=_counts(draft_id)[0]), on_which(name), unfinished]

    def on_go(engine: str, which: str, some: bool, over: bool, first: bool, *values: Any) -> None:
        *typed, selected = values
        options: dict[str, Any] = {"engine": engine, "trigger": draft.trigger(draft_id) if first else ""}
        for (of, name), value in zip(fields, typed, strict=True):
            if of in ("all", engine):
                kept = type(DEFAULTS[name])() if value is None else value  # a field that is empty
                options[name] = kept.strip() if isinstance(kept, str) and of != "all" else kept
        start(draft_id, options, which, selected if some and selected else None, over and which == "all")

    chosen = [engine, which, some, over, first, *fields.values(), ids]
    engine.change(on_engine, engine, [engine, *(groups[key] for key in ENGINES)], **fold.QUIET)
    which.change(on_which, which, over, **fold.QUIET)
    more = [(again.click, lambda *_: resume(draft_id))]
    state = fold.job(go, on_go, look, lambda: cancel(draft_id), "captions", chosen, form.CHOSEN, [given], more)
    state.change(on_new_captions, which, [which, over, again], **fold.QUIET)
    state.change(None, None, None, js=form.SHOW_NEW, **fold.QUIET)


def _unfinished(status: dict[str, Any]) -> bool:
    return status["state"] not in ("", "running") and status["done"] < status["total"]


# The job --------------------------------------------------------------------------------------------------------------


def begin(
    draft_id: str,
    options: dict[str, Any],
    which: str = "empty",
    only: Iterable[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Store what the next job is. Returns the number of its images. Raises RunError: there is nothing to do, or the
    disk does not take it.

    Args:
        options: of captions/options.py, by name. which: images without a caption ("empty"), also those with one that a
            model wrote ("model"), or "all". only: ids of the images to choose from; None: all.
        overwrite: with "all", also replace captions that a person wrote or that came from a file.
    """
    chosen = None if only is None else set(only)
    with draft.locked(draft_id) as file:
        state, wanted = file.state, dict[str, Any]()
        for key, entry in state["images"].items():
            if chosen is not None and key not in chosen:
                continue
            # A text that nobody wrote is only the trigger word.
            empty, by_model = not entry["caption"].strip() or not entry["caption_by"], entry["caption_by"] == "model"
            if empty or (by_model and which != "empty") or (which == "all" and overwrite):
                wanted[key] = {"seen": entry["caption"]}
        if not state["images"]:
            raise RunError("Add images first")
        if chosen is not None and chosen.isdisjoint(state["images"]):
            raise RunError("The selected images were removed; select others, or clear the selection")
        if not wanted:
            raise RunError(
                "Every one of these images has a caption that is to be kept. Choose “All images”, or allow it to replace captions."
            )
        new = {"job": secrets.token_hex(8), "options": options, "overwrite": overwrite, "total": len(wanted)}
        file.store({**state, "captions": new, "wanted": draft_store.placed(wanted)})
    return len(wanted)


def _left(draft_id: str) -> int:
    """The images that the last job has not described yet; one that was removed meanwhile needs no caption."""
    state = draft_store.read(draft_id)
    return sum(key in state["images"] for key in state["wanted"])


def stored(draft_id: str) -> dict[str, Any] | None:
    """What the last job is; None when there was none."""
    return draft_store.read(draft_id)["captions"] or None


class DraftWork:
    """The images of a draft's job."""

    def __init__(self, draft_id: str) -> None:
        """Raises RunError: there is no job."""
        found = stored(draft_id)
        if found is None:
            raise RunError("This draft has no captions to write; start them on the page")
        self.draft_id, self.job, self.total = draft_id, found["job"], found["total"]
        self.options, self.overwrite = found["options"], found["overwrite"]
        self.part, _ = self.counts()  # where this process began: its steps of undo are its own

    def missing(self) -> list[Picture]:
        """The images that still want a caption."""
        state, root = draft_store.read(self.draft_id), draft.images_dir(self.draft_id)
        return [
            Picture(key, entry["file"], root / entry["stored"], entry["turn"], entry["crop"])
            for key in state["wanted"]
            if (entry := state["images"].get(key))
        ]

    def counts(self) -> tuple[int, int]:
        """Images that are done, and all of the job."""
        return self.total - _left(self.draft_id), self.total

    def store(self, picture: Picture, caption: str) -> None:
        """Store a caption, unless a person has written one since the job began."""
        with draft.locked(self.draft_id) as file:
            wanted = dict(file.state["wanted"])
            seen = wanted.pop(picture.key, {}).get("seen")

            def make(key: str, entry: Entry) -> Entry | None:
                changed = entry["caption"] not in (seen, caption)
                by_a_person = entry["caption_by"] in (draft.PERSON, draft.FILE) and not self.overwrite
                if entry["caption"].strip() and (changed or by_a_person):
                    return None
                return draft.captioned(entry, draft.plain_text(caption), "model")

            part = (self.counts()[0] - self.part) // STEP_IMAGES
            step = f"captions:{self.job}:{self.part}:{part}"
            draft.change_images(self.draft_id, [picture.key], make, "captions written by a model", merge=step)
            file.store({**file.state, "wanted": wanted})


def main(argv: list[str]) -> int:
    """Write what is missing of a draft. Exit code 1: the reason why not all of it was written is on standard error."""
    (draft_id,) = argv
    try:
        work = DraftWork(draft_id)
        report = write(work, checked(work.options))
    except RunError as error:
        print(f"captions: {error}", file=sys.stderr)
        return 1
    job.say(job.summary(report))
    if report.reason:
        print(f"captions: stopped: {report.reason}", file=sys.stderr)
    return 1 if report.reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
