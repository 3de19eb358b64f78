"""Steps 2 and 3: the settings of a draft as fields, and the spec, plan and script that their values give.

The fields accept any text, and are stored one by one as they are typed. Only `RunSpec` validates values, because a
component that refuses a value also loses it. A draft holds only the fields that somebody set; the others have the
values that suit the base model, this machine and the number of images, and follow them. So the page, the API, a sweep,
a rehearsal and an export need no values from each other. Labels and help texts are in runs/fields.py; defaults come
from presets/defaults.toml.
"""

import contextlib
import functools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import presets
from jobs import queue
from monitor.phrases import count
from presets.steps import Images
from runs import env_file, flags, weights
from runs.command import samples
from runs.dataset import shown_per_epoch, too_often
from runs.fields import EMPTY, HEAD, KEYS, LABELS, LENGTH, MACHINES, MORE, SAMPLES, SUBJECT, SUBJECTS
from runs.files import Fault, RunError
from runs.folders import name_fault, planned_steps, problems, with_intervals, with_own_save_dir
from runs.machine import Machine, this_machine, tier_for
from runs.paths import outputs_dir
from runs.sanity import IMPOSSIBLE, judge
from runs.scripts import script
from runs.spec import RunSpec, make
from ui.dataset import bucket_preview, draft, image_edit
from ui.run.readers import latest

BACKENDS = {"diffusers": "Built-in (Diffusers)", "sd-scripts": "kohya's sd-scripts", "musubi": "kohya's musubi-tuner"}
# Fields that depend on the base model and on what is trained: choosing either sets each that the user has not typed.
MODEL_FIELDS = ("tier", "resolution", "rank", "alpha", "learning_rate", "mixed_precision", "sample_steps")
TEXTS = ("name", "trigger", "prompts", "flags", "control_dir")
FOLLOWING = ("repeats", "epochs")  # follow the number of images, until one of them is set
# For events of the page (ui/new/fields.js): before one, what was typed is stored; after one, the page shows it.
FLUSH = "async (...values) => { await hangproof.flush(); return values; }"
# The last value is replaced by the ids of the images that are selected on the cards (ui/dataset/images.js).
# CHOSEN does what FLUSH does first.
SELECTED = "(...values) => [...values.slice(0, -1), hangproof.selected()]"
CHOSEN = "async (...values) => { await hangproof.flush(); return [...values.slice(0, -1), hangproof.selected()]; }"
# The cards (SHOW_NEW) or the fields (SYNC) show what the server has stored, in the other tabs of this browser too.
SHOW_NEW = "() => { hangproof.showNew(); hangproof.tellOthers(); return []; }"
SYNC = "() => { hangproof.sync(); hangproof.tellOthers(); return []; }"


def defaults() -> dict[str, Any]:
    """Initial form values by key."""
    table = presets.defaults()["run"]
    values = {key: table.get(key, "") for key in KEYS}
    # Without a number of steps, samples are drawn after each tenth of the run, about.
    values |= {"sample_every_n_steps": "", "nodes": 1, "subject": SUBJECT.choices[0][1]}
    return {**values, **_texts(values)}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The numbers that text fields show."""
    return {key: f"{values[key]:g}" for key in ("alpha", "learning_rate")}


def _choices() -> dict[str, Collection[str]]:
    """The values of each field that is a choice. Raises PresetError: the user's table of models is invalid."""
    fields = {one.key: [value for _, value in one.choices] for one in (SUBJECT, *MORE) if one.kind == "choice"}
    return {"model": presets.models(), "tier": presets.tiers(), "backend": BACKENDS, **fields}


def restored(stored: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults, or `others`, replaced by stored values; a choice that no longer exists is dropped."""
    allowed = _choices()
    kept = {k: v for k, v in stored.items() if k in KEYS and (k not in allowed or v in allowed[k])}
    kept |= {k: str(v) for k, v in kept.items() if k in TEXTS and isinstance(v, int | float)}  # a program's name=7
    return {**(defaults() if others is None else others), **kept}


@dataclass(frozen=True)
class Review:
    """What the form's values give, from one pass over them.

    spec: as a run gets it, with its intervals; None where a field is invalid. images: their number by folder. faults:
    what prevents a start, by key of the form; missing: what has not been entered yet, which prevents a start as well;
    warnings: what lets the run start. items: the images where they are known; buckets: theirs by folder, else `images`.
    """

    values: dict[str, Any]
    images: dict[str, int]
    spec: RunSpec | None
    faults: tuple[Fault, ...]
    missing: tuple[Fault, ...]
    warnings: tuple[Fault, ...]
    items: Sequence[draft.Item]
    buckets: Images

    @cached_property
    def steps(self) -> int:
        """The optimizer steps of the run; 0 without a spec or images."""
        return planned_steps(self.spec, self.buckets) if self.spec is not None and self.images else 0

    def marks(self, starting: bool = False) -> dict[str, list[list[str]]]:
        """What to show beside each field: [["bad" or "warn", sentence], …] by key."""
        found: dict[str, list[list[str]]] = {}
        for kind, faults in (("bad", (*(self.missing if starting else ()), *self.faults)), ("warn", self.warnings)):
            for one in faults:
                if one.field in KEYS:
                    found.setdefault(one.field, []).append([kind, one.message])
        return found


def review(
    values: dict[str, Any],
    images: Mapping[str, int],
    machine: Machine | None = None,
    ask: bool = False,
    items: Sequence[draft.Item] = (),
) -> Review:
    """Parse and judge the form's values. Start uses this function too: what it allows, starts.

    Args:
        images: their number by folder. machine: as in runs.sanity.judge.
        ask: as in runs.folders.problems. items: the images themselves, whose masks not every trainer uses.
    """
    missing: list[Fault] = []
    warnings: list[Fault] = []
    if not (values["name"] or "").strip():
        missing.append(Fault("name", "Give your LoRA a name"))
    if not sum(images.values()):
        missing.append(Fault("images", "Add at least one image in step 1; 10 to 30 make a good LoRA"))
    spec, faults = parse(values)
    buckets = images if spec is None else buckets_of(spec, images, items)
    if any(item.weight > 1 for item in items) and (many := too_often((item.folder, item.weight) for item in items)):
        faults.append(Fault("images", many))
    if spec is not None:
        refused = any(fault.field == "extra" for fault in faults)
        given = *judged(spec, machine), buckets
        found_now = latest("findings", None, given, functools.partial(judge, spec, buckets, machine))
        findings = [one for one in found_now if not (refused and one.field == "extra")]
        taken = None if any(fault.field == "name" for fault in missing) else name_fault(spec)
        found = [*([taken] if taken else []), *problems(spec, ask=ask, with_data=False)]
        try:
            samples(spec)
        except RunError as error:
            found += error.faults
        if spec.control_dir and not Path(spec.control_dir).expanduser().is_dir():
            text = f"There is no folder {spec.control_dir}; create it, or correct the path"
            found.append(Fault("control_dir", text))
        # Only Start reports these as errors: the model's notes offer the next step, and the folder is not named yet.
        later = {"model"} if weights.can_be_fetched(spec) else set[str]()
        later |= set() if spec.control_dir else {"control_dir"}
        missing += [one for one in found if one.field in later]
        faults += [one for one in found if one.field not in later]
        faults += [finding for finding in findings if finding.severity == IMPOSSIBLE]
        warnings = [finding for finding in findings if finding.severity != IMPOSSIBLE]
        warnings += [Fault("extra", env_file.kept_text(spec.secrets))] if spec.secrets else []
        if edited := [item for item in items if item.mask is not None or item.crop is not None or item.turn > 0]:
            notes = image_edit.start_notes(edited, spec.backend, bool(spec.control_dir))
            warnings += [Fault("images", note) for note in notes]
        if bare := undescribed(spec.trigger, items):
            warnings.append(Fault("images", bare))
        spec = with_intervals(spec, images, [item.caption for item in items])
    return Review(values, dict(images), spec, _in_form(faults), tuple(missing), _in_form(warnings), items, buckets)


def judged(spec: RunSpec | None, machine: Machine | None = None) -> tuple[Any, ...]:
    """What rules and estimates know of a run: all but its words, so that what they say stays while a word is typed."""
    steady = machine and replace(machine, free_disk_gb=round(machine.free_disk_gb, 1))
    return spec and (spec.model_dump(exclude={"name", "trigger"}), presets.models()[spec.model]), steady


def buckets_of(spec: RunSpec, images: Mapping[str, int], items: Sequence[draft.Item]) -> Images:
    """By folder, what `planned_steps` counts: the bucket of each image, which matters in batches of several only."""
    return bucket_preview.by_folder(spec, items) if items and spec.batch_size > 1 else images


def undescribed(trigger: str, items: Sequence[draft.Item]) -> str:
    """That some images have neither a caption nor the trigger word, as a sentence; "" where all have one."""
    bare = sum(not item.caption.strip() for item in items)
    if not bare or trigger.strip():
        return ""
    have = "has" if bare == 1 else "have"
    return (
        f"{bare} of {count(len(items), 'image')} {have} no caption, and there is no trigger word: no prompt will bring "
        "back what they show. Type a trigger word in step 2, or describe the images"
    )


def parse(values: dict[str, Any]) -> tuple[RunSpec | None, list[Fault]]:
    """The RunSpec of the form's values, and what is wrong with them; no spec where a field is invalid.

    A flag that the trainer refuses is a fault of a valid spec. The other fields are judged without a name, too.
    """
    given, faults = {key: values[key] for key in HEAD}, list[Fault]()
    given["name"] = values["name"] if (values["name"] or "").strip() else "my-lora"
    if presets.models().get(values["model"], {}).get("control"):  # another model's run does not use the folder
        given["control_dir"] = (values["control_dir"] or "").strip()
    for field in (*LENGTH, *MORE, *MACHINES, *SAMPLES):
        value = values[field.key]
        empty = value is None or (isinstance(value, str) and not value.strip())
        if field.key == "prompts":
            given[field.key] = [line for line in (value or "").splitlines() if line.strip()]
        elif empty and field.key not in EMPTY:
            faults.append(Fault(field.key, f"Enter a value; the default is {defaults()[field.key]}"))
        else:
            given[field.key] = EMPTY[field.key] if empty else value
    if lines := [line for line in (values["flags"] or "").splitlines() if line.strip()]:
        try:
            given, wrong = flags.settings(lines, given)
        except presets.PresetError as error:
            wrong = [Fault("model", str(error))]
        faults += wrong
    try:
        spec = make(given)
    except RunError as error:
        return None, faults + list(error.faults)
    return (None if faults else spec), faults + (flags.flag_faults(spec) if spec.extra else [])


def _in_form(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Faults with the keys of the form: a field of the spec that the form lacks is set in "Extra trainer options"."""
    keys = {key: key for key in ("", *LABELS)} | {"extra": "flags"}
    return tuple(
        Fault(keys[one.field], one.message) if one.field in keys else Fault("flags", str(one)) for one in faults
    )


def spec_of(values: dict[str, Any]) -> RunSpec:
    """The RunSpec of the form's values.

    Raises:
        RunError: one fault for each invalid field, by key of the form.
    """
    named = bool((values["name"] or "").strip())
    spec, faults = parse(values)
    faults = [*([] if named else [Fault("name", "Give your LoRA a name")]), *faults]
    if faults or spec is None:
        raise RunError(_in_form(faults))
    return spec


def shown(fault: Fault) -> str:
    """A fault as the page shows it away from its field: with the field's label."""
    return f"{LABELS[fault.field]}: {fault.message}" if fault.field in LABELS else str(fault)


def values_of_spec(spec: RunSpec, images: Mapping[str, int]) -> dict[str, Any]:
    """Form values that give this spec with these images, their number by folder; the inverse of `spec_of`.

    A spec field without a form field goes into "Extra trainer options" when it differs from its default.
    """
    given = {"name": spec.name, "model": spec.model, "backend": spec.backend}  # not every backend trains every model
    fields, plain = spec.model_dump(), make(given).model_dump()
    for key in ("save_every_n_steps", "sample_every_n_steps"):
        if fields[key] and getattr(with_intervals(spec.changed(**{key: None}), images), key) == fields[key]:
            fields[key] = None  # the value that an empty field gives
    values = {key: fields.pop(key) for key in KEYS if key in fields}
    prompts = "\n".join(" ".join(prompt.splitlines()) for prompt in spec.prompts)
    values |= {"prompts": prompts, "alpha": str(spec.alpha), "learning_rate": str(spec.learning_rate)}
    values |= {key: "" if values[key] is None else str(values[key]) for key, empty in EMPTY.items() if empty is None}
    lines = {k: v for k, v in fields.items() if k not in ("extra", "environment", "edited") and v != plain[k]}
    values |= {key: str(values[key] or "").removesuffix(".0") for key, empty in EMPTY.items() if empty == 0.0}
    for field in MORE:
        if field.kind == "choice" and values[field.key] not in dict(field.choices).values():
            lines[field.key] = values.pop(field.key)
    lines |= spec.extra
    values["flags"] = "".join(f"{key}={as_text(value)}\n" for key, value in lines.items())
    return {**defaults(), **values}


def as_text(value: object) -> str:
    """An option's value as written in its line; of several lines, which would be options of their own, one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)
    return " ".join(text.splitlines())


def script_of(review: Review) -> tuple[str, bool]:
    """(the script that Start writes, True); or (comments with the reasons why the values give none, False)."""
    reasons = [*review.missing[:1], *review.faults]
    if review.spec is not None and not any(fault.field == "name" for fault in review.missing):
        try:
            return script(with_own_save_dir(review.spec), outputs_dir() / review.spec.slug), True
        except RunError as error:
            reasons = [*error.faults]
    head = "The script appears here once these errors are fixed:"
    return "".join(
        f"# {line}\n" for line in (head, *(line for one in reasons for line in shown(one).splitlines()))
    ), False


def subject_of(key: str) -> dict[str, Any]:
    """A row of presets/subjects.toml: what is trained, with its rank and steps."""
    return next(one for one in SUBJECTS if one["key"] == key)


def model_values(key: str, backend: str, subject: str, machine: Machine | None = None) -> dict[str, Any]:
    """The values that suit a base model and what is trained: a trainer that can train it, and MODEL_FIELDS.

    The VRAM choice is that of the machine's GPU; without one, the first choice, or the smallest that holds the model.
    """
    model = presets.models()[key]
    backend = backend if backend in model["backends"] else model["backends"][0]
    settings = {**presets.defaults()["run"], **model["settings"]}
    rank = subject_of(subject)["rank"]
    settings |= {"rank": rank, "alpha": rank * settings["alpha"] / settings["rank"]}
    return {
        **{field: settings[field] for field in MODEL_FIELDS},
        **_texts(settings),
        "backend": backend,
        "tier": _tier_of(key, backend, machine),
    }


def _tier_of(key: str, backend: str, machine: Machine | None) -> str:
    if machine is not None and machine.vram_gb:
        return tier_for(machine, key, backend)
    usual = tier_for(machine) if machine is not None else presets.defaults()["run"]["tier"]
    return presets.smallest_tier(key, backend) if presets.tiers_of(key, backend)[usual]["problem"] else usual


def same(a: object, b: object) -> bool:
    """Whether two values of a field are equal, as texts or as numbers."""
    try:
        return float(str(a)) == float(str(b))
    except ValueError:
        return a == b


# The length that suits the images -----------------------------------------------------------------------------------

# A person takes 1,500 to 2,500 steps, a habit of LoRA trainers: FluxGym's defaults (10 repeats, 16 epochs) give 1,600 to
# 3,200 for the 10 to 20 images that its guide recommends, but 48,000 for 300; kohya_ss users aim at 100 for each of 20.
LEAST, TARGET, MOST = 1500, 2000, 2500
USUAL_EPOCHS = range(8, 21)  # enough saved LoRAs to choose from, and few enough for every one to differ
MAX_REPEATS = 100


@dataclass(frozen=True)
class Proposal:
    """Repeats, epochs and the optimizer steps that they give."""

    repeats: int
    epochs: int
    steps: int


def propose(images: int, fixed: int = 0, batch_size: int = 1, accumulation: int = 1, target: int = TARGET) -> Proposal:
    """The proposal for these images on one GPU; the defaults for none.

    The steps are between LEAST and MOST, which go with `target`, where any choice of repeats and epochs gives that
    many, else as near as possible. Of those, the usual number of epochs comes first, then about `target` steps, then
    repeats near FluxGym's 10. fixed: images of folders with their own repeats, each counted that often.
    """
    least, most = LEAST * target // TARGET, MOST * target // TARGET
    if images + fixed <= 0:
        table = presets.defaults()["run"]
        return Proposal(table["repeats"], table["epochs"], 0)
    choices = []
    for repeats in range(1, MAX_REPEATS + 1 if images else 2):
        each = math.ceil(math.ceil((images * repeats + fixed) / batch_size) / accumulation)
        near = {max(1, n // each + more) for n in (target, least, most) for more in (0, 1)}
        choices += [Proposal(repeats, epochs, epochs * each) for epochs in sorted(near)]
        if each > 2 * most:
            break

    def rank(one: Proposal) -> tuple[int, int, int, int, int]:
        outside = max(least - one.steps, one.steps - most, 0)
        unusual = max(USUAL_EPOCHS[0] - one.epochs, one.epochs - USUAL_EPOCHS[-1], 0)
        away = abs(one.steps - target)
        return outside, unusual, away // 100, abs(one.repeats - 10), away

    return min(choices, key=rank)


# The settings of a draft ----------------------------------------------------------------------------------------------


def current(draft_id: str) -> dict[str, Any]:
    """All settings by field. RunError: there is no such draft; PresetError: the user's table of models is invalid."""
    stored = draft.form(draft_id)
    model, backend, subject = (restored(stored)[key] for key in ("model", "backend", "subject"))
    values = restored(stored, {**defaults(), **model_values(model, backend, subject, this_machine())})
    if not set(FOLLOWING) <= stored.keys() and (found := proposal(draft_id, values)):
        values = {**values, "repeats": found.repeats, "epochs": found.epochs}
        values |= {key: stored[key] for key in FOLLOWING if key in stored}
    return values


def reviewed(draft_id: str, ask: bool = False) -> Review:
    """The draft's settings and images, parsed and judged. Raises as `current`. ask: see runs.folders.problems."""
    values, items = current(draft_id), draft.items(draft_id)
    machine = this_machine(values["backend"])
    if machine.vram_free_gb is not None and queue.under_way():  # the next run starts when that one has freed its memory
        machine = replace(machine, vram_free_gb=None)
    return review(values, draft.counts(draft_id), machine, ask=ask, items=items)


def proposal(draft_id: str, values: Mapping[str, Any]) -> Proposal | None:
    """Repeats and epochs for the draft's images; folders such as `10_cat` keep theirs. None: a field is invalid."""
    batch, accumulation = values["batch_size"], values["gradient_accumulation"]
    if not all(isinstance(one, int | float) and 1 <= one < 1e9 and one == int(one) for one in (batch, accumulation)):
        return None
    counts, steps = draft.counts(draft_id), subject_of(values["subject"])["steps"]

    def make() -> Proposal:
        fixed = shown_per_epoch(counts, 0)
        return propose(shown_per_epoch(counts, 1) - fixed, fixed, int(batch), int(accumulation), steps)

    return latest("proposal", None, (counts, batch, accumulation, steps), make)


def save(draft_id: str, changes: Mapping[str, Any], typed: bool = False) -> None:
    """Store fields exactly as they were entered, valid or not; the others stay.

    Args:
        typed: on the page, where a field that is set back to the base model's own value follows the model again.

    Raises:
        RunError: there is no such field or choice, or the disk does not take it; nothing was stored.
    """
    if wrong := sorted(str(key) for key in changes if key not in KEYS):
        raise RunError(f"There is no setting {wrong[0][:100]!r}; use some of {', '.join(KEYS)}")
    for key, value in changes.items():
        # An answer of Gradio has no number of more than 64 bits: the draft would never open again.
        if not isinstance(value, str | int | float | None) or (isinstance(value, int) and value.bit_length() > 63):
            raise RunError(f"{key}: a setting is a text, a number of at most 18 digits, or null")
    with contextlib.suppress(presets.PresetError):  # `current` reports it
        for key, known in _choices().items():
            if changes.get(key) is not None and changes[key] not in known:
                there = ", ".join(filter(None, known))
                raise RunError(f"{LABELS[key]}: there is no {str(changes[key])[:100]!r}; use one of {there}")
    with draft.locked(draft_id):
        try:
            more, following = _follow(draft_id, changes, typed)
        except presets.PresetError:  # `current` reports it
            more, following = {}, set[str]()
        draft.save_fields(draft_id, {**more, **changes}, following)


def _follow(draft_id: str, changes: Mapping[str, Any], typed: bool) -> tuple[dict[str, Any], set[str]]:
    """The fields that these changes also set, and those that follow the base model from now on."""
    more, following = {}, set[str]()
    if changes.keys() & {*FOLLOWING}:
        now = current(draft_id)
        more = {key: now[key] for key in FOLLOWING}
    if changes.keys() & {"model", *MODEL_FIELDS}:
        now = restored({**draft.form(draft_id), **changes})
        own = model_values(now["model"], now["backend"], now["subject"], this_machine())
        if "model" in changes and "backend" not in changes and now["backend"] != own["backend"]:
            following.add("backend")  # it cannot train the model just chosen
        if typed:
            following |= {key for key in MODEL_FIELDS if key in changes and same(changes[key], own[key])}
    return more, following
