"""What is wrong with the images and captions of a draft: the findings of "Check images", as pure functions.

All of it comes from the draft's items, so that a finding and the warning on a card never disagree
(draft_images.warnings_of). What the pixels show was measured when the image was dropped (draft_images.looks_of).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presets.tables import read_toml
from ui.dataset.bucket_preview import Plan, Slot
from ui.dataset.draft import Item

# Found by trying: photos, and the same blurred by 2 pixels, darkened and brightened (test_checks.py).
LEAST_SHARPNESS = 0.01  # variance of the Laplacian, in parts of the variance of the brightness, in a thumbnail
LEAST_CONTRAST = 30.0  # variance of the brightness below which sharpness says nothing: fog, a plain colour
DARK_HIGH, DARK_MEAN = 70, 30  # of 255: 95 of 100 pixels and the mean of a picture that is too dark are below
MOST_CONTRAST = 600.0  # variance of its brightness; stars at night have more
MOST_GREY = 0.05  # share of rows at the lower end that are plain grey
LEAST_KEPT = 0.85  # share of a picture that its bucket keeps


@dataclass(frozen=True)
class Kind:
    """A kind of finding: a row of checks.toml."""

    title: str
    about: str
    fix: str = ""

    def heading(self, number: int) -> dict[str, Any]:
        """What the page shows above the images."""
        fix_all = f"{self.fix} (all {number:,})" if number > 1 and self.fix else self.fix
        return {"title": f"{self.title}: {number:,}", "about": self.about, "count": number, "fix_all": fix_all}


KINDS = {key: Kind(**row) for key, row in read_toml(Path(__file__).with_suffix(".toml")).items()}


@dataclass(frozen=True)
class Finding:
    """One image with one problem. detail: for people; other: the id of the image that is kept instead, "" for none."""

    id: str
    detail: str = ""
    other: str = ""


Findings = dict[str, list[Finding]]


def findings(items: Sequence[Item], damaged: list[Finding], trigger: str = "", plan: Plan | None = None) -> Findings:
    """All findings by kind, in the order of KINDS; kinds without any are left out.

    Args:
        damaged: those of the files. plan: where each image is trained; None while the form has errors.
    """
    found: Findings = {"damaged": damaged, **_copies(items)}
    for item in items:
        for kind, detail in of_item(item, plan.slots.get(item.id) if plan else None, " ".join(trigger.split())).items():
            found.setdefault(kind, []).append(Finding(item.id, detail))
    if plan is not None:
        found["lonely"] = [
            Finding(one, f"{few.size[0]} × {few.size[1]}: {few.shown} of {plan.batch_size} for a batch")
            for few in plan.buckets
            if few.few
            for one in few.images
        ]
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def of_item(item: Item, slot: Slot | None, word: str) -> dict[str, str]:
    """What is wrong with one image alone, by kind: what is said of it. word: the trigger word, "" for none."""
    looks, (width, height) = item.looks, item.trained_size
    found = dict.fromkeys({"sideways", "no_caption"} & {*item.warnings}, "")
    if "small" in item.warnings:
        found["small"] = f"{width} × {height} pixels"
    if slot and slot.kept < LEAST_KEPT:
        bucket = f"{slot.bucket[0]} × {slot.bucket[1]}"
        found["cropped"] = f"{bucket} keeps {slot.kept * 100:.0f} % of {width} × {height}"
    if is_blurred(item):
        found["blurred"] = ""
    if looks.get("grey", 0) > MOST_GREY:
        found["cut"] = f"the lower {looks['grey']:.0%}"
    if looks and looks["contrast"] <= MOST_CONTRAST and looks["high"] < DARK_HIGH and looks["mean"] < DARK_MEAN:
        found["dark"] = f"mean brightness {looks['mean']:.0f} of 255"
    if item.changes:
        found["changed"] = item.changes
    its_own = rf"(?<!\w){re.escape(word)}(?!\w)"  # not a part of another word
    if word and item.caption.strip() and not re.search(its_own, item.caption, re.IGNORECASE):
        found["no_trigger"] = shortened(item.caption)
    return found


def _copies(items: Sequence[Item]) -> Findings:
    """Exact copies (the same file, or the same pixels), then nearly identical images among those that are kept."""
    exact: dict[str, list[Item]] = {}
    for item in items:
        exact.setdefault(item.looks.get("pixels", item.sha256), []).append(item)
    kept_for = {one.id: best_of(same) for same in exact.values() for one in same}
    groups: dict[str, dict[str, Item]] = {}
    for item in items:
        if (first := kept_for.get(item.near)) is not None:
            group = groups.setdefault(first.id, {first.id: first})
            group[kept_for[item.id].id] = kept_for[item.id]
    near: list[Finding] = []
    for group in groups.values():
        best = best_of(list(group.values()))
        near += [Finding(one.id, other=best.id) for one in group.values() if one is not best]
    copies = [Finding(one.id, other=kept_for[one.id].id) for one in items if one is not kept_for[one.id]]
    return {"duplicate": copies, "near": near}


def best_of(items: Sequence[Item]) -> Item:
    """The image to keep of several: one that is not blurred, with the most pixels, with a caption that a person wrote,
    then any, then the first."""
    rank = {"person": 3, "file": 2, "model": 1}

    def worth(item: Item) -> tuple[bool, int, int, bool]:
        width, height = item.trained_size
        return not is_blurred(item), width * height, rank.get(item.caption_by, 0), bool(item.caption.strip())

    return max(items, key=worth)


def is_blurred(item: Item) -> bool:
    """Whether a picture is not sharp anywhere; False where that is not known."""
    looks = item.looks
    return bool(looks) and looks["contrast"] >= LEAST_CONTRAST and looks["sharpness"] < LEAST_SHARPNESS


def shortened(text: str, most: int = 80) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else text[: most - 1] + "…"
