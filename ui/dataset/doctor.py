""" "Check images" in step 1: what is wrong with the images and captions, each with a fix, and the buckets they are trained in.

All of it is computed from the draft each time something changed: the pixels were measured when the images were dropped
(draft_images.looks_of). Each fix is one step that undo takes back.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import presets
import runs
from monitor.phrases import count
from runs.files import RunError
from ui.dataset import bucket_preview, checks, draft, draft_store
from ui.dataset.bucket_preview import Bucket, Plan
from ui.dataset.checks import KINDS, Finding, Findings
from ui.dataset.draft import Item
from ui.dataset.draft_images import Entry

PAGE = 24
MOST_BUCKETS = 200
REMOVED_BY = ("damaged", "duplicate", "near", "small", "enlarged", "blurred", "dark", "bright")
BUCKETS = "buckets"  # beside the kinds of findings


@dataclass(frozen=True)
class Report:
    """What is known of a draft now."""

    items: dict[str, Item]
    findings: Findings
    plan: Plan | None
    plan_error: str

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that are shown."""
        return list(self.plan.buckets)[:MOST_BUCKETS] if self.plan else []


def examine(draft_id: str, again: bool = False) -> Report:
    """The findings of a draft, computed where the draft has changed, or `again`. Raises RunError: the draft cannot be read."""
    form, items, memory = draft.form(draft_id), draft.items(draft_id), draft_store.memory(draft_id)
    known_items, known_form, report = memory.get("report", (None, None, None))
    if report is None or again or known_items is not items or known_form is not form:
        plan, error = _plan(draft_id, items)
        found = checks.findings(items, _damaged(draft_id), draft.trigger(draft_id), plan)
        report = Report({item.id: item for item in items}, found, plan, error)
        memory["report"] = items, form, report
    return report


def _damaged(draft_id: str) -> list[Finding]:
    """The images whose file is not the one that was added; a start decodes them all, and finds other damage."""
    found = []
    for key, entry in draft_store.read(draft_id)["images"].items():
        try:
            size = (draft.images_dir(draft_id) / entry["stored"]).stat().st_size
        except OSError as error:
            found.append(Finding(key, f"its file cannot be read ({error.strerror}); remove the image and add it again"))
            continue
        if size != entry["bytes"]:
            found.append(Finding(key, "its file was changed since you added it; remove it and add it again"))
    return found


def _plan(draft_id: str, items: list[Item]) -> tuple[Plan | None, str]:
    """The buckets with the settings of step 2; or why there are none."""
    from ui.new import form, settings

    try:
        spec, faults = form.parse({**settings.current(draft_id), "name": "my-lora"})
        if spec is None:
            return None, f"{form.shown(faults[0])} (step 2)"
        return bucket_preview.plan(spec, items), ""
    except (runs.RunError, presets.PresetError) as error:
        return None, str(error)


# Actions ---------------------------------------------------------------------------------------------------------------


def fix(draft_id: str, kind: str, only: Iterable[str] | None = None) -> str:
    """Fix the findings of a kind, as one step that can be undone.

    Args:
        only: ids of the images; None: all with this finding.

    Returns:
        A sentence about what was done.

    Raises:
        RunError: there is no such finding any more, or it cannot be fixed.
    """
    report = examine(draft_id)
    wanted = None if only is None else set(only)
    found = [one for one in report.findings.get(kind, []) if wanted is None or one.id in wanted]
    if kind not in KINDS or not KINDS[kind].fix:
        raise RunError(draft.OUT_OF_DATE)
    if not found:
        raise RunError("There is nothing left to fix here; the images were changed meanwhile")
    ids = [one.id for one in found]
    if kind in REMOVED_BY:
        draft.remove(draft_id, ids)
        return f"Removed {count(len(ids), 'image')}."
    change, text = _change(draft_id, report, kind)
    number = draft.change_images(draft_id, ids, change, f"{text} of {{}}")
    if not number:
        raise RunError("No bucket with enough images is near; add images, or set the batch size to 1")
    return f"{text[:1].upper()}{text[1:]} of {count(number, 'image')}."


Change = Callable[[str, Entry], dict[str, Any] | None]


def _change(draft_id: str, report: Report, kind: str) -> tuple[Change, str]:
    """What a fix changes of an image's entry (None: nothing), and what undo calls it."""
    if kind in ("no_caption", "no_trigger"):
        make = draft.with_trigger(draft.trigger(draft_id))
        return lambda key, entry: make(entry), "trigger word"
    if kind == "sideways":
        return lambda key, entry: draft.upright(entry), "rotation"
    own = {key: slot.bucket for key, slot in (report.plan.slots if report.plan else {}).items()}
    sizes = own if kind == "cropped" else _full_bucket(report)

    def crop(key: str, entry: Entry) -> dict[str, Any] | None:
        size = sizes.get(key)
        return None if size is None else {"crop": list(bucket_preview.crop_for(report.items[key], size[0] / size[1]))}

    return crop, "crop"


def _full_bucket(report: Report) -> dict[str, tuple[int, int]]:
    """For each image of a bucket smaller than a batch, the bucket with enough images whose shape is nearest."""
    found: dict[str, tuple[int, int]] = {}
    buckets = report.plan.buckets if report.plan else []
    for bucket in buckets:
        full = [one.size for one in buckets if not one.few and one.folder == bucket.folder]
        if bucket.few and full:
            aspect = bucket.size[0] / bucket.size[1]
            nearest = min(full, key=lambda size: max(size[0] / size[1] / aspect, aspect / (size[0] / size[1])))
            found |= dict.fromkeys(bucket.images, nearest)
    return found


# What the page and the API show --------------------------------------------------------------------------------------------


def report(draft_id: str) -> dict[str, Any]:
    """The findings by kind with their numbers, and the buckets. Raises RunError: the draft cannot be read."""
    found = examine(draft_id)
    buckets = [{**vars(one), "number": n, "images": len(one.images)} for n, one in enumerate(found.buckets)]
    return {
        "total": len(found.items),
        "kinds": [{"kind": kind, **KINDS[kind].heading(len(some))} for kind, some in found.findings.items()],
        "buckets": buckets,
        "plan_error": found.plan_error,
        "resolution": found.plan.resolution if found.plan else 0,
    }


def pictures(report: Report, kind: str, bucket: int = 0) -> list[Finding]:
    """The images of a finding, or of the bucket with this number (`kind` BUCKETS)."""
    if kind == BUCKETS and 0 <= bucket < len(report.buckets):
        return [Finding(key) for key in report.buckets[bucket].images]
    return report.findings.get(kind, [])
