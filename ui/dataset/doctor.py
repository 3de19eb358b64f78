""" "Check images" in step 2: what is wrong with the images and captions, each with a fix, and the buckets they are trained in.

The pixels are measured by a process of its own (ui/dataset/measure.py), so that 10,000 images do not block the server,
and a check goes on when the server is restarted; so does a conversion of many (`python -m ui.dataset.doctor`). What is
shown is computed anew from the draft each time, so that an edit elsewhere changes it. Each fix is one step that undo
takes back.
"""

import hashlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import presets
import runs
from runs.files import RunError, explained
from runs.pictures import decoded
from ui import jobs
from ui.dataset import bucket_preview, checks, draft, draft_store, measure
from ui.dataset.bucket_preview import Bucket, Plan
from ui.dataset.checks import KINDS, Finding, Findings
from ui.dataset.draft import Item
from ui.dataset.draft_images import Entry
from ui.dataset.images import thumb_url

JOB = "checks"
LIMIT_S = 6 * 3600.0
PAGE = 24
MOST_BUCKETS = 200
REMOVED_BY = ("damaged", "duplicate", "near", "small", "enlarged", "blurred", "dark", "bright")
BUCKETS = "buckets"  # beside the kinds of findings
CONVERTED_BY = ("changed", "exif")
STEP_IMAGES = 50  # that are converted and undone together
MOST_KEPT = 4  # drafts whose findings are kept


@dataclass(frozen=True)
class Report:
    """What is known of a draft now. unmeasured: contents whose pixels were not looked at yet."""

    items: dict[str, Item]
    findings: Findings
    plan: Plan | None
    plan_error: str
    unmeasured: int


_reports: OrderedDict[str, tuple[Any, Report]] = OrderedDict()


def examine(draft_id: str) -> Report:
    """The findings of a draft. Raises RunError: the draft cannot be read."""
    state, folder = draft_store.read(draft_id), draft.folder(draft_id)
    items, measures = draft.items(draft_id), measure.stored(folder)
    known = _reports.get(draft_id)
    key = (items, measures, state["form"])
    if known is not None and all(one is other for one, other in zip(known[0], key, strict=True)):
        return known[1]
    plan, error = _plan(draft_id, items)
    found = checks.findings(items, measures, draft.trigger(draft_id), plan)
    left = len({item.sha256 for item in items if item.sha256 not in measures})
    report = Report({item.id: item for item in items}, found, plan, error, left)
    _reports[draft_id] = key, report
    while len(_reports) > MOST_KEPT:
        _reports.popitem(last=False)
    return report


def _plan(draft_id: str, items: list[Item]) -> tuple[Plan | None, str]:
    """The buckets with the settings of step 1; or why there are none."""
    from ui.new import form, settings

    try:
        spec, faults = form.parse({**settings.current(draft_id), "name": "my-lora"})
        if spec is None:
            return None, f"{form.shown(faults[0])} (step 1)"
        return bucket_preview.plan(spec, items), ""
    except (runs.RunError, presets.PresetError) as error:
        return None, str(error)


# Actions ---------------------------------------------------------------------------------------------------------------


def start(draft_id: str) -> None:
    """Measure what is new, in the background. Raises RunError: it runs already, or there are no images."""
    if not draft.counts(draft_id):
        raise RunError("Add images first")
    jobs.start(draft.folder(draft_id), JOB, ["ui.dataset.doctor", draft_id], LIMIT_S)


def cancel(draft_id: str) -> None:
    """End the check; what it found so far stays."""
    jobs.cancel(draft.folder(draft_id), JOB)


def progress(draft_id: str) -> dict[str, Any] | None:
    """{"state", "done", "total", "error"} of the last check or conversion; None when there was none."""
    folder = draft.folder(draft_id)
    job = jobs.read(folder, JOB)
    if job is None:
        return None
    text, _, errors = jobs.output(folder, JOB)
    done, _, total = (text.strip().splitlines() or ["0 of 0"])[-1].partition(" of ")
    numbers = [int(one) if one.isdecimal() else 0 for one in (done, total)]
    return {
        "state": job.state,
        "seconds": round(job.seconds),
        "done": numbers[0],
        "total": numbers[1],
        "error": errors[-500:],
    }


def fix(draft_id: str, kind: str, only: Iterable[str] | None = None) -> str:
    """Fix the findings of a kind, as one step that can be undone.

    Args:
        only: ids of the images; None: all with this finding.

    Returns:
        A sentence about what was done; "" when a process does it in the background (a conversion of all).

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
    if kind in CONVERTED_BY:
        return _convert_found(draft_id, kind, ids, wanted is None)
    if kind in REMOVED_BY:
        draft.remove(draft_id, ids)
        return f"Removed {draft_store.count(len(ids), 'image')}."
    change, text = _change(draft_id, report, kind)
    number = draft.change_images(draft_id, ids, change, f"{text} of {{}}")
    if not number:
        raise RunError("No bucket with enough images is near; add images, or set the batch size to 1")
    return f"{text[:1].upper()}{text[1:]} of {draft_store.count(number, 'image')}."


def _convert_found(draft_id: str, kind: str, ids: list[str], all_of_them: bool) -> str:
    if all_of_them and len(ids) > 1:
        jobs.start(draft.folder(draft_id), JOB, ["ui.dataset.doctor", draft_id, kind], LIMIT_S)
        return ""
    if not convert(draft_id, ids, lambda line: None):
        raise RunError("The image cannot be read; remove it")
    for item in draft.items(draft_id):
        if item.id in ids:  # one picture is measured here, and not by a process for it alone
            measure.run(
                draft.folder(draft_id), {item.id: draft_store.read(draft_id)["images"][item.id]}, lambda line: None
            )
    return f"Converted {draft_store.count(len(ids), 'image')}."


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
    if report.plan is None:
        return found
    for bucket in report.plan.buckets:
        full = [
            one.size
            for one in report.plan.buckets
            if one.shown >= report.plan.batch_size and one.folder == bucket.folder and one.size != bucket.size
        ]
        if bucket.shown < report.plan.batch_size and full:
            aspect = bucket.size[0] / bucket.size[1]
            nearest = min(full, key=lambda size: max(size[0] / size[1] / aspect, aspect / (size[0] / size[1])))
            found |= dict.fromkeys(bucket.images, nearest)
    return found


# What the page and the API show --------------------------------------------------------------------------------------------


def report(draft_id: str) -> dict[str, Any]:
    """The findings by kind with their numbers, the buckets, and how far the check is. Raises RunError: the draft cannot be read."""
    found = examine(draft_id)
    return {
        "total": len(found.items),
        "unmeasured": found.unmeasured,
        "job": progress(draft_id),
        "kinds": [_heading(kind, len(some)) for kind, some in found.findings.items()],
        "buckets": [_bucket(n, one, found.plan) for n, one in enumerate(_buckets(found))],
        "plan_error": found.plan_error,
        "resolution": found.plan.resolution if found.plan else 0,
    }


def _heading(kind: str, number: int) -> dict[str, Any]:
    one = KINDS[kind]
    fix_all = (one.fix_them if number > 1 else "") or one.fix
    shown = {"kind": kind, "title": one.title(number), "about": one.about, "count": number}
    return {**shown, "fix_all": fix_all, "fix_one": one.fix if number > 1 else "", "write": one.write}


def _buckets(report: Report) -> list[Bucket]:
    return list(report.plan.buckets)[:MOST_BUCKETS] if report.plan else []


def _bucket(number: int, bucket: Bucket, plan: Plan | None) -> dict[str, Any]:
    return {
        "number": number,
        "size": list(bucket.size),
        "folder": bucket.folder,
        "images": len(bucket.images),
        "shown": bucket.shown,
        "few": bool(plan and bucket.shown < plan.batch_size),
    }


def pictures(draft_id: str, kind: str, most: int, bucket: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The first images of a finding, or of the bucket with this number (`kind` BUCKETS), and how many there are."""
    report = examine(draft_id)
    some = report.findings.get(kind, [])
    if kind == BUCKETS and 0 <= bucket < len(buckets := _buckets(report)):
        some = [Finding(key) for key in buckets[bucket].images]
    return [_shown(draft_id, report, one) for one in some[:most]], len(some)


def _shown(draft_id: str, report: Report, found: Finding) -> dict[str, Any]:
    """An image of a finding: its thumbnail, what is trained of it, and the image that is kept instead."""
    item, other = report.items[found.id], report.items.get(found.other)
    slot = report.plan.slots.get(found.id) if report.plan else None
    return {
        "id": found.id,
        "file": f"{item.folder}/{item.file}" if item.folder else item.file,
        "detail": found.detail,
        "thumb": thumb_url(draft_id, item),
        "kept": slot.kept if slot else 1,
        "part": slot.part if slot else (0, 0, 1, 1),
        "other": other.file if other else "",
        "other_thumb": thumb_url(draft_id, other) if other else "",
    }


# The process --------------------------------------------------------------------------------------------------------------


def convert(draft_id: str, ids: Sequence[str], on_line: Callable[[str], object] = print) -> int:
    """Convert these images; returns how many. One that cannot be read is left as it is. Raises RunError: the disk does
    not take them."""
    entries, done = draft_store.read(draft_id)["images"], 0
    todo = [key for key in ids if key in entries]
    for start in range(0, len(todo), STEP_IMAGES):
        shown = (on_line(f"{number} of {len(todo)}") for number in itertools.count(start))
        done += _convert(draft_id, {key: entries[key] for key in todo[start : start + STEP_IMAGES]}, shown)
    on_line(f"{len(todo)} of {len(todo)}")
    return done


def _convert(draft_id: str, entries: dict[str, Entry], shown: Iterator[object]) -> int:
    """Convert these images as one step; `shown` is asked for its next value before each."""
    root = draft.images_dir(draft_id)
    with explained("store a converted image"), draft_store.working(draft_id) as work:
        made = {
            key: _converted(root, work, key, entry) for (key, entry), _ in zip(entries.items(), shown, strict=False)
        }

        def store(key: str, entry: Entry) -> Entry | None:
            new = made[key]
            if new is None or entry["stored"] != entries[key]["stored"]:
                return None
            (work / new["stored"]).replace(root / new["stored"])
            return new

        return draft.change_images(draft_id, made, store, "conversion of {}")


def _converted(root: Path, work: Path, key: str, entry: Entry) -> Entry | None:
    """The fields of an entry whose file is the converted one, which is written into `work`; None when it cannot be read."""
    try:
        image, suffix, _ = decoded(root / entry["stored"], entry["file"])
    except RunError:
        return None
    new = work / f"{key}{suffix}"
    if suffix == ".jpg":
        image.save(new, format="JPEG", exif=b"", quality=95, subsampling=0)
    else:
        image.save(new, format="PNG", exif=b"", compress_level=3)
    with new.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    stored = f"{key}-{sha256[:12]}{suffix}"
    new.replace(work / stored)
    return {
        "stored": stored,
        "file": f"{Path(entry['file']).stem}{suffix}",
        "sha256": sha256,
        "bytes": (work / stored).stat().st_size,
        "width": image.width,
        "height": image.height,
        "upright": 0,
    }


def main(argv: list[str]) -> int:
    """The process of a check: `DRAFT`; or of a long conversion: `DRAFT KIND` converts the images with this finding."""

    def show(line: str) -> None:
        print(line, flush=True)

    def work() -> None:
        draft_id, *kinds = argv
        for kind in kinds:
            convert(draft_id, [one.id for one in examine(draft_id).findings.get(kind, [])], show)
        measure.run(
            draft.folder(draft_id), draft_store.read(draft_id)["images"], (lambda line: None) if kinds else show
        )

    return jobs.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
