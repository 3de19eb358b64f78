"""What is wrong with the images and captions of a draft: the findings of "Check images", as pure functions.

All of it comes from the draft's items, so that a finding and the warning on a card never disagree
(draft_images.warnings_of). What the pixels show was measured when the image was dropped (draft_images.looks_of).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ui.dataset.bucket_preview import Plan, Slot
from ui.dataset.draft import Item

# Found by trying: photos and the same photos blurred by 2 pixels, darkened and brightened (tests/unit/ui/dataset/test_checks.py).
LEAST_SHARPNESS = 0.01  # variance of the Laplacian, in parts of the variance of the brightness, in a thumbnail
LEAST_CONTRAST = 30.0  # variance of the brightness below which sharpness says nothing: fog, a plain colour
DARK_HIGH, DARK_MEAN = 70, 30  # of 255: 95 of 100 pixels and the mean of a picture that is too dark are below
BRIGHT_LOW, BRIGHT_MEAN = 200, 225  # 5 of 100 pixels and the mean of a picture that is too bright are above
MOST_CONTRAST = 600.0  # variance of the brightness of both; stars at night and lines on paper have more
ENLARGED = 1.1  # an image that is enlarged more than this to be trained
LEAST_KEPT = 0.85  # share of a picture that its bucket keeps


@dataclass(frozen=True)
class Kind:
    """A kind of finding. title: of its images; about: what it means; fix: the button; write: whether new captions are a fix, too."""

    title: str
    about: str
    fix: str = ""
    write: bool = False

    def heading(self, number: int) -> dict[str, Any]:
        """What the page shows above the images."""
        fix_all, fix_one = (f"{self.fix} (all {number:,})", self.fix) if number > 1 and self.fix else (self.fix, "")
        shown = {"title": f"{self.title}: {number:,}", "about": self.about, "count": number, "write": self.write}
        return {**shown, "fix_all": fix_all, "fix_one": fix_one}


PIXELS = "A sharp one with the most pixels and a caption of yours is kept."
KINDS = {
    "damaged": Kind("Damaged", "The file was changed since you added it. A run with it would not start.", "Remove"),
    "duplicate": Kind("Copies", f"The same picture is trained more often than the others. {PIXELS}", "Remove"),
    "near": Kind("Nearly identical", f"Pictures of one moment teach the LoRA that moment. {PIXELS}", "Remove"),
    "small": Kind("Too small to learn from", "The LoRA learns their blocks and noise.", "Remove"),
    "enlarged": Kind(
        "Enlarged to be trained",
        "They have fewer pixels than the resolution in step 2. Use larger originals, or a lower resolution.",
        "Remove",
    ),
    "blurred": Kind("Perhaps blurred", "The LoRA learns the blur. Keep those that are meant to be soft.", "Remove"),
    "dark": Kind("Very dark", "There is little to learn from them.", "Remove"),
    "bright": Kind("Very bright", "There is little to learn from them.", "Remove"),
    "sideways": Kind(
        "Perhaps on their side",
        "A program rotated the pixels and left the camera's mark, so that they are rotated twice.",
        "Rotate",
    ),
    "cropped": Kind(
        "Cut off by the trainer",
        "No bucket has their shape, so the trainer cuts off both ends. Crop them here to choose the part yourself; the button "
        "crops as the trainer would.",
        "Crop",
    ),
    "lonely": Kind(
        "In buckets smaller than a batch",
        "Their batches have fewer images than the others, so these images count more. The button crops to the nearest full bucket.",
        "Crop",
    ),
    "changed": Kind(
        "Converted before the training",
        "The trainers read them differently, so a run gets a converted copy.",
    ),
    "no_caption": Kind(
        "Without a caption",
        "They are trained with the trigger word alone. Captions make a LoRA that follows prompts.",
        "Use the trigger word",
        write=True,
    ),
    "no_trigger": Kind(
        "Without the trigger word",
        "What the LoRA learns from them does not belong to your trigger word.",
        "Put it first",
    ),
    "style": Kind(
        "Captions in another style",
        "Most captions are of one kind, sentences or tags. A LoRA follows prompts in the style of its captions, so use one.",
        write=True,
    ),
}


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
    slots = plan.slots if plan else {}
    found: Findings = {
        "damaged": damaged,
        **_copies(items),
        "sideways": [Finding(i.id) for i in items if "sideways" in i.warnings],
        **_pixels(items, slots),
        "lonely": _lonely(plan),
        "changed": [Finding(item.id, item.changes) for item in items if item.changes],
        **_captions(items, trigger),
    }
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def _copies(items: Sequence[Item]) -> Findings:
    """Exact copies (the same file, or the same pixels), then nearly identical images among those that are kept."""
    exact: dict[str, list[Item]] = {}
    for item in items:
        exact.setdefault(item.looks.get("pixels", item.sha256), []).append(item)
    copies: list[Finding] = []
    kept_for: dict[str, Item] = {}
    for same in exact.values():
        best = best_of(same)
        copies += [Finding(one.id, other=best.id) for one in same if one is not best]
        kept_for |= {one.id: best for one in same}
    groups: dict[str, dict[str, Item]] = {}
    for item in items:
        if (first := kept_for.get(item.near)) is not None:
            group = groups.setdefault(first.id, {first.id: first})
            group[kept_for[item.id].id] = kept_for[item.id]
    near: list[Finding] = []
    for group in groups.values():
        best = best_of(list(group.values()))
        near += [Finding(one.id, other=best.id) for one in group.values() if one is not best]
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


def _pixels(items: Sequence[Item], slots: Mapping[str, Slot]) -> Findings:
    found: Findings = {kind: [] for kind in ("small", "enlarged", "blurred", "dark", "bright", "cropped")}
    for item in items:
        looks, slot = item.looks, slots.get(item.id)
        width, height = item.trained_size
        if "small" in item.warnings:
            found["small"].append(Finding(item.id, f"{width} × {height} pixels"))
        elif slot and slot.scale > ENLARGED:
            found["enlarged"].append(Finding(item.id, f"{width} × {height} pixels, enlarged {slot.scale:.1f} times"))
        if slot and slot.kept < LEAST_KEPT:
            bucket = f"{slot.bucket[0]} × {slot.bucket[1]}"
            found["cropped"].append(Finding(item.id, f"{bucket} keeps {slot.kept * 100:.0f} % of {width} × {height}"))
        if is_blurred(item):
            found["blurred"].append(Finding(item.id))
        if not looks or looks["contrast"] > MOST_CONTRAST:
            continue
        brightness = f"mean brightness {looks['mean']:.0f} of 255"
        if looks["high"] < DARK_HIGH and looks["mean"] < DARK_MEAN:
            found["dark"].append(Finding(item.id, brightness))
        if looks["low"] > BRIGHT_LOW and looks["mean"] > BRIGHT_MEAN:
            found["bright"].append(Finding(item.id, brightness))
    return found


def _lonely(plan: Plan | None) -> list[Finding]:
    if plan is None:
        return []
    return [
        Finding(one, f"{bucket.size[0]} × {bucket.size[1]}: {bucket.shown} of {plan.batch_size} for a batch")
        for bucket in plan.buckets
        if bucket.few
        for one in bucket.images
    ]


# Captions --------------------------------------------------------------------------------------------------------------


def _captions(items: Sequence[Item], trigger: str) -> Findings:
    word = " ".join(trigger.split())
    written = [item for item in items if item.caption.strip()]
    styles = {item.id: style_of(item.caption, word) for item in written}
    counts = Counter(style for style in styles.values() if style)
    main, number = counts.most_common(1)[0] if counts else ("", 0)
    mixed = 2 < number < counts.total()
    return {
        "no_caption": [Finding(item.id) for item in items if "no_caption" in item.warnings],
        "no_trigger": [Finding(i.id, shortened(i.caption)) for i in written if word and not has_word(i.caption, word)],
        "style": [
            Finding(item.id, shortened(item.caption)) for item in written if mixed and styles[item.id] not in ("", main)
        ],
    }


def has_word(caption: str, word: str) -> bool:
    """Whether a caption contains the trigger word as a word of its own, in any case."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", caption, re.IGNORECASE))


def style_of(caption: str, trigger: str = "") -> str:
    """ "tags", "sentences", or "" where a caption is too short to tell."""
    pieces = [piece.split() for piece in caption.split(",") if piece.strip() and piece.strip() != trigger]
    words = sum(len(piece) for piece in pieces)
    if len(pieces) >= 3 and words / len(pieces) <= 2.5:
        return "tags"
    if words >= 6 and words / len(pieces) >= 4:
        return "sentences"
    return ""


def shortened(text: str, most: int = 80) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else text[: most - 1] + "…"
