"""The script of step 3 as a person edits it: stored with the draft, checked while it is typed, and run exactly as written.

A draft's folder has `script.json`: the edited script, the script that the form gave when it was edited, and a version. A change
names the version that it was made from, so that of two windows none overwrites the other. The form's later changes never
change the edited script: a notice shows them, and the person chooses. Only the run's name and folder follow the form.
"""

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runs
from runs import adopt_script, custom_script, env_file
from runs.files import Fault, RunError, atomic_write, explained
from runs.machine import this_machine
from runs.manage import size_text
from ui import scripts
from ui.dataset import calls, draft
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.new import export, form, settings

if TYPE_CHECKING:
    import gradio as gr

FILE = "script.json"
STALE = "The settings changed after you edited the script. Choose below the script which of both is used"
NO_SCRIPT = "There is no script yet: correct the errors in the form first"
_lock = threading.Lock()
Stored = dict[str, str]  # version, script, generated


def stored(draft_id: str) -> Stored | None:
    """The edited script of a draft; None where it is not edited. RunError: the file is damaged."""
    path = draft.folder(draft_id) / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("version", "script", "generated")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); move it to another folder, then reload the page") from error


def save(draft_id: str, text: str, version: str, generated: str) -> dict[str, Any]:
    """Store an edited script.

    Args:
        version: of the script that was edited, "" for the generated one. generated: what the form gives now.

    Returns:
        {version}, or {conflict: {version, script}} when another window has stored a script since; nothing is stored then.
    """
    text = draft.plain_text(text)
    if len(text.encode("utf-8", "replace")) > custom_script.MAX_BYTES:
        raise RunError(f"The script is larger than {custom_script.MAX_BYTES // 1000} kB; shorten it")
    with _lock:
        known = stored(draft_id)
        if known is not None and known["version"] != version and known["script"] != text:
            return {"conflict": {"version": known["version"], "script": known["script"]}}
        base = custom_script.follow(known["generated"], known["generated"], generated) if known else generated
        return {"version": _write(draft_id, text, base)}


def _write(draft_id: str, script: str, generated: str) -> str:
    """Store an edited script, its secrets apart; returns its version."""
    script, apart = env_file.of_script(script)
    env_file.write(_apart(draft_id), {**env_file.read(_apart(draft_id)), **apart})
    value = {"version": secrets.token_hex(8), "script": script, "generated": generated}
    with explained("store the script"):
        draft.folder(draft_id).mkdir(parents=True, exist_ok=True)
        atomic_write(draft.folder(draft_id) / FILE, json.dumps(value))
    return value["version"]


def _apart(draft_id: str) -> Path:
    """What the file with the script's secrets is named after."""
    return draft.folder(draft_id) / FILE


def discard(draft_id: str) -> Stored | None:
    """Use the generated script again; returns the edited one, which `save` can bring back."""
    with _lock:
        known = stored(draft_id)
        with explained("use the generated script"):
            (draft.folder(draft_id) / FILE).unlink(missing_ok=True)
        return known


def copy_from_run(draft_id: str, spec: "runs.RunSpec") -> None:
    """Take over a run's script with its settings: the edited one, or none."""
    discard(draft_id)
    env_file.forget(_apart(draft_id))
    env_file.write(
        draft.folder(draft_id), {name: spec.environment[name] for name in spec.secrets if name in spec.environment}
    )
    if spec.edited:
        _write(draft_id, spec.edited.script, spec.edited.generated)


def for_run(draft_id: str, spec: "runs.RunSpec") -> "runs.RunSpec":
    """The spec of the run that Start creates: with the draft's secrets, and with its edited script where it has one.

    Raises:
        RunError: Start refuses the script, or the settings changed after it was edited.
    """
    known, spec = stored(draft_id), env_file.filled(spec, draft.folder(draft_id))
    if known is None:
        return spec
    spec = form.complete(spec, draft.counts(draft_id), [one.caption for one in draft.items(draft_id)])
    folder = runs.outputs_dir() / spec.slug
    now = runs.script(spec, folder)
    if changed_settings(known["generated"], now):
        raise RunError([Fault("script", STALE)])
    spec = env_file.with_values(spec, env_file.read(_apart(draft_id)))
    return adopt_script.adopt(spec, custom_script.follow(known["script"], known["generated"], now), folder)


def changed_settings(base: str, now: str) -> list[str]:
    """How the generated script differs from the one that was edited, as lines of a diff; the run's name does not count."""
    return custom_script.diff(custom_script.follow(base, base, now), now, ("", ""))


def reviewed(draft_id: str, review: form.Review) -> form.Review:
    """A review with the settings that the edited script has, for the plan and the estimates."""
    try:
        known = stored(draft_id)
        if known is None or review.spec is None:
            return review
        spec = form.complete(review.spec, review.images)
        folder = runs.outputs_dir() / spec.slug
        text = custom_script.follow(known["script"], known["generated"], runs.script(spec, folder))
        return replace(review, spec=adopt_script.plain(adopt_script.adopt(spec, text, folder)))
    except RunError:
        return review


def value(draft_id: str, generated: str, ready: bool) -> dict[str, Any]:
    """What the component shows: {edited, ready, version, script, changed: lines of a diff}.

    Args:
        ready: whether `generated` is a script, and not the reasons why there is none.
    """
    known = stored(draft_id)
    if known is None:
        return {"edited": False, "ready": ready}
    text = custom_script.follow(known["script"], known["generated"], generated) if ready else known["script"]
    lines = changed_settings(known["generated"], generated) if ready else []
    return {"edited": True, "ready": ready, "version": known["version"], "script": text, "changed": lines}


# Calls of the script. Each takes a dict from the browser and checks every value ---------------------------------------------


def _generated(draft_id: str) -> str:
    """The script that the stored form gives. RunError: it gives none."""
    review = _review(draft_id)
    if review.spec is None:
        raise RunError(NO_SCRIPT)
    spec = form.complete(review.spec, review.images)
    return runs.script(spec, runs.outputs_dir() / spec.slug)


def _review(draft_id: str) -> form.Review:
    values = settings.current(draft_id)
    return form.review(values, draft.counts(draft_id), this_machine(values["backend"]))


def findings(text: str, generated: str) -> list[dict[str, Any]]:
    """What is wrong with a script: {level, line, text, advice, fix}; level is as in runs.custom_script.Problem."""
    found = custom_script.problems(text, generated)
    return [{"level": p.level, "line": p.line, "text": p.text, "advice": p.advice, "fix": p.fix} for p in found[:50]]


def _text(data: Mapping[str, Any], key: str = "text") -> str:
    found = data.get(key, "")
    if not isinstance(found, str):
        raise RunError(OUT_OF_DATE)
    return found


def _start(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    """The text to edit, and what is wrong with it."""
    known, now = stored(draft_id), _generated(draft_id)
    text = custom_script.follow(known["script"], known["generated"], now) if known else now
    return {"script": text, "version": known["version"] if known else "", "findings": findings(text, now)}


def _save(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    now, text = _generated(draft_id), _text(data)
    answer = save(draft_id, text, _text(data, "version"), now)
    if "conflict" in answer:
        their = answer["conflict"]["script"]
        return {**answer, "changed": custom_script.diff(their, text, ("", ""))}
    return {**answer, "findings": findings(text, now), **_changed(draft_id, now)}


def _changed(draft_id: str, now: str) -> dict[str, Any]:
    known = stored(draft_id)
    return {"changed": changed_settings(known["generated"], now) if known else []}


def _fix(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"script": custom_script.fix(_text(data), _text(data, "fix"), _generated(draft_id))}


def _discard(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    known = discard(draft_id)
    return {"script": _generated(draft_id), "before": known["script"] if known else ""}


def _keep(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    """Keep the edited script although the settings changed."""
    return _follow(draft_id, lambda *scripts: (custom_script.follow(*scripts), {}))


def _merge(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    """Apply the changed settings to the edited script."""

    def change(*scripts: str) -> tuple[str, dict[str, Any]]:
        text, left = custom_script.merged(*scripts)
        return text, {"left": left}

    return _follow(draft_id, change)


def _follow(draft_id: str, change: Callable[[str, str, str], tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Store the edited script for the changed settings.

    Args:
        change: gets the edited script, the generated one that it was edited from, and the one that is generated now; returns the
            new edited script and what else the answer has.
    """
    now = _generated(draft_id)
    with _lock:
        known = stored(draft_id)
        if known is None:
            raise RunError(OUT_OF_DATE)
        text, more = change(known["script"], known["generated"], now)
        version = _write(draft_id, text, now)
    return {"version": version, "script": text, **more, "findings": findings(text, now), "changed": []}


def _export(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    export.start(draft_id)
    return _export_status(draft_id, data)


def _export_status(draft_id: str, _data: dict[str, Any]) -> dict[str, Any]:
    answer = export.status(draft_id)
    if "file" not in answer:
        return answer
    path = Path(answer.pop("file"))
    return {**answer, "name": path.name, "url": file_url(path), "size": size_text(answer["bytes"])}


ACTIONS: dict[str, calls.Action] = {
    "start": _start,
    "save": _save,
    "fix": _fix,
    "discard": _discard,
    "keep": _keep,
    "merge": _merge,
    "export": _export,
    "export_status": _export_status,
}


def script_tools(data: dict[str, Any]) -> dict[str, Any]:
    """All calls of the script's tools: `do` is a name in ACTIONS. {"ok": False, "error"} says what is wrong."""
    return calls.answer_of(ACTIONS, data)


# The text and the state that the script asks for with its event `show`.
SHOW = "(value) => hangproof.script(value)"
TYPED = "(text) => hangproof.typed(text)"


def build() -> "gr.HTML":
    """The tools below the script: edit, findings, the choice after a change of the settings, export."""
    return scripts.component("script_editor", "script-tools", script_tools, events=("show",))
