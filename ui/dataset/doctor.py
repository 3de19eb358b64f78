""" "Check images" in step 2: what is wrong with the images and captions, each with a fix.

All of it is computed from the draft each time something changed: the pixels were measured when the images were dropped
(draft_images.looks_of). Each fix is one step that undo takes back.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runs.files import RunError
from ui.dataset import checks, draft, draft_store
from ui.dataset.checks import KINDS, Finding, Findings
from ui.dataset.draft import Item

PAGE = 24
REMOVED_BY = ("damaged", "duplicate", "near", "small", "blurred", "dark", "bright")
MOST_KEPT = 4  # drafts whose findings are kept


@dataclass(frozen=True)
class Report:
    """What is known of a draft now."""

    items: dict[str, Item]
    findings: Findings


_reports: OrderedDict[str, tuple[Any, Report]] = OrderedDict()


def examine(draft_id: str, again: bool = False) -> Report:
    """The findings of a draft, computed where the draft has changed, or `again`. Raises RunError: the draft cannot be read."""
    items, trigger = draft.items(draft_id), draft.trigger(draft_id)
    known = _reports.get(draft_id)
    if known is not None and not again and known[0][0] is items and known[0][1] == trigger:
        return known[1]
    report = Report({item.id: item for item in items}, checks.findings(items, _damaged(draft_id), trigger))
    _reports[draft_id] = (items, trigger), report
    while len(_reports) > MOST_KEPT:
        _reports.popitem(last=False)
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
        return f"Removed {draft_store.count(len(ids), 'image')}."
    rotates = kind == "sideways"
    change = draft.upright if rotates else draft.with_trigger(draft.trigger(draft_id))
    text = "rotation" if rotates else "trigger word"
    number = draft.change_images(draft_id, ids, lambda _, entry: change(entry), f"{text} of {{}}")
    return f"{text[:1].upper()}{text[1:]} of {draft_store.count(number, 'image')}."


# What the page and the API show --------------------------------------------------------------------------------------------


def report(draft_id: str) -> dict[str, Any]:
    """The findings by kind with their numbers. Raises RunError: the draft cannot be read."""
    found = examine(draft_id)
    return {"total": len(found.items), "kinds": [_heading(kind, len(some)) for kind, some in found.findings.items()]}


def _heading(kind: str, number: int) -> dict[str, Any]:
    one = KINDS[kind]
    fix_all = (one.fix_them if number > 1 else "") or one.fix
    shown = {"kind": kind, "title": one.title(number), "about": one.about, "count": number}
    return {**shown, "fix_all": fix_all, "fix_one": one.fix if number > 1 else "", "write": one.write}
