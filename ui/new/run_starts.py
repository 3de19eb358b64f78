"""The one way from a draft to a run: its stored settings, edited script and images become a spec, a run, a started run.

The page, the API, sweeps, rehearsals and exports name the draft and pass no settings along, so all train the same run.
"""

import tempfile
from pathlib import Path
from typing import Any

import runs
from runs import env_file
from runs.dataset import folder_names
from runs.files import Fault, RunError
from runs.folders import create as create_run, unpaired, with_intervals, with_own_save_dir
from runs.spec import RunSpec, make
from ui.dataset import captioning, draft, draft_store, imports
from ui.new import form, script_editor
from ui.run import actions


class NotStarted(RunError):
    """The run was created and could not be started."""

    def __init__(self, problem: RunError, folder: Path, messages: list[str]) -> None:
        super().__init__(f"The run {folder.name} was created but did not start: {problem}")
        self.folder, self.messages = folder, messages


def start(draft_id: str) -> tuple[Path, list[str]]:
    """Create a run of the draft and start it; while its GPU is busy, it waits in the queue.

    After a rehearsal of these settings failed, with images that nothing describes, or while captions are written, the
    first call refuses and says so; the second one starts.

    Returns:
        The run's folder, and messages: the warnings, and which images and captions were changed.

    Raises:
        NotStarted: the run was created. RunError: one fault for each error, by key of the form; no run was created and
            the draft is unchanged.
    """
    spec, warnings = checked(draft_id)
    spec, rehearsed = for_run(draft_id, spec), rehearsal_folder(draft_id)
    ask(draft_id, spec)
    folder, messages = create(draft_id, spec)
    if rehearsed.is_dir():
        from launch import rehearse

        rehearse.hand_on(rehearsed, folder)
    return begin(folder, [*warnings, *messages])


def ask(draft_id: str, spec: RunSpec) -> None:
    """Raise RunError, the first time, where a person may have overlooked something: see `start`."""
    written = "Captions are still being written; the run would have those of this moment"
    writing = draft_store.read(draft_id)["wanted"] and captioning.running(draft_id)
    questions = [written if writing else form.undescribed(spec.trigger, draft.items(draft_id))]
    if (rehearsed := rehearsal_folder(draft_id)).is_dir():
        from launch import rehearse

        questions.append(rehearse.objection(rehearsed, spec))
    if text := actions.ask_once(draft.folder(draft_id), *questions):
        raise RunError(text)


def begin(folder: Path, messages: list[str]) -> tuple[Path, list[str]]:
    """Start a run that was just created; returns both arguments. Raises NotStarted."""
    try:
        actions.start(folder)
    except RunError as error:
        raise NotStarted(error, folder, messages) from error
    return folder, messages


def checked(draft_id: str) -> tuple[RunSpec, list[str]]:
    """The spec of the draft's settings after all checks, and the warnings.

    Raises:
        RunError: one fault for each error, by key of the form.
    """
    no_import(draft_id)
    found = form.reviewed(draft_id, ask=True)
    if found.missing or found.faults or found.spec is None:
        raise RunError([*found.missing, *found.faults])
    names = folder_names((item.folder, item.weight) for item in found.items)
    images = (Path(name) / item.file for name, item in zip(names, found.items, strict=True))
    if fault := _store_fault(found.spec) or unpaired(found.spec, images):
        raise RunError([fault])
    return found.spec, [f"Warning: {form.shown(warning)}" for warning in found.warnings]


def for_run(draft_id: str, spec: RunSpec) -> RunSpec:
    """The spec of the draft's run: with its save and sample intervals, its secrets, and its edited script where it has
    one. Raises RunError: Start refuses the script, or the settings changed after it was edited."""
    spec = with_intervals(spec, draft.counts(draft_id), [one.caption for one in draft.items(draft_id)])
    spec = env_file.filled(with_own_save_dir(spec), draft.folder(draft_id))
    return script_editor.adopted(draft_id, spec) if draft.edited_script(draft_id).is_file() else spec


def no_import(draft_id: str) -> None:
    """Raise RunError while images are imported into the draft: a run would have only a part of them."""
    if imports.status(draft_id)["waiting"]:
        raise RunError([Fault("images", "Images are still being imported in step 1; wait, or cancel the import")])


def create(draft_id: str, spec: RunSpec) -> tuple[Path, list[str]]:
    """Create a run with the draft's images.

    Returns:
        The run's folder, and which images and captions were changed.
    """
    messages: list[str] = []
    given = draft.taken(draft_id)  # before: what is typed while the images are written is in no run
    folder = create_run(spec, draft.sources(draft_id), on_note=messages.append)
    draft.mark_in_a_run(draft_id, given)
    return folder, messages


def rehearsal_folder(draft_id: str) -> Path:
    """Where the draft's rehearsal and its result are."""
    return draft.folder(draft_id) / "rehearsal"


# The example run: 8 photographs × 4 repeats × 10 epochs = 320 steps, with ten samples; about 40 s on two CPU cores.
EXAMPLE: dict[str, Any] = {
    "model": "tiny-flux",
    "backend": "diffusers",
    "tier": "16G",
    "repeats": 4,
    "epochs": 10,
    "save_every_n_epochs": 5,
    "sample_every_n_steps": None,
    "workers": 0,
}
SAMPLES = "This run uses example photos and a toy model, so its samples are noise. Your own run works the same way."


def start_example() -> tuple[Path, list[str]]:
    """Create a run on example photographs with the tiny model, and start it: it needs no GPU, and no draft changes.

    Returns as `start`. Raises NotStarted, RunError, PresetError.
    """
    from runs.examples import TRIGGER, write_examples

    fields = {"trigger": TRIGGER, "prompts": [f"{TRIGGER}, a shiny red ball"], **EXAMPLE}
    with tempfile.TemporaryDirectory() as photos:
        write_examples(Path(photos))
        while True:
            spec = make({**fields, "name": runs.free_name("first-try")})
            try:
                folder = create_run(spec, Path(photos))
                break
            except RunError:
                if runs.free_name("first-try") == spec.name:  # else somebody else took it at the same moment
                    raise
    return begin(folder, [SAMPLES])


def _store_fault(spec: RunSpec) -> Fault | None:
    """Why the address of a store cannot be used: another kind of address, a secret in it, a library that is missing.

    Only asked at Start, because some of those libraries take a second to import.
    """
    from launch.common import LaunchError
    from launch.store.places import open_place

    try:
        if spec.store:
            open_place(spec.store)
    except LaunchError as error:
        return Fault("store", str(error))
    return None
