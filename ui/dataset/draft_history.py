"""Undo and redo: the difference between two states of a draft, as a table that JSON can hold.

A step keeps what changed on both sides, not whole states, because a caption among 10,000 must not cost 10,000 captions
of disk. Steps are undone in reverse order only, so each finds the state that it left behind.
"""

from collections.abc import Iterable, Mapping
from typing import Any

PARTS = ("images", "texts")  # the tables of a draft that can be undone, both from a key to a flat table
UNDO, REDO = 0, 1
# What a user sees of an image. A change of other fields, such as where it came from, is stored without a step.
SHOWN = ("caption", "turn", "file", "folder", "crop", "mask", "weight", "stored")
FILES = ("stored", "mask")  # the fields of an image that name a file of the draft
State = dict[str, Any]
Step = dict[str, Any]


def difference(before: State, after: State) -> Step:
    """The step from one state to another; empty when they are equal.

    Each changed key has [before, after]: None where it does not exist, else the values that differ. "at": for each
    image that was added or removed, its places [before, after]. "order": the orders before and after where images
    changed places.
    """
    step: Step = {}
    for part in PARTS:
        changes, left, right = {}, before[part], after[part]
        for key, old in left.items():
            new = right.get(key)
            if old is new:
                continue
            if new is not None:
                names = [name for name in new if name not in old or old[name] != new[name]]
                old, new = {name: old.get(name) for name in names}, {name: new[name] for name in names}
            if old != new:
                changes[key] = [old, new]
        changes |= {key: [None, new] for key, new in right.items() if key not in left}
        if changes:
            step[part] = changes
    orders = [list(before["images"]), list(after["images"])]
    if orders[UNDO] != orders[REDO]:
        common = [[key for key in order if key in before["images"] and key in after["images"]] for order in orders]
        if common[UNDO] != common[REDO]:
            step["order"] = orders
        else:
            places = [{key: number for number, key in enumerate(order)} for order in orders]
            step["at"] = {key: [place.get(key) for place in places] for key in images_of(step)}
    return step


def applied(state: State, step: Step, side: int) -> State:
    """The state before a step (`side` UNDO) or after it (REDO), from the state on the other side."""
    result = dict(state)
    for part in PARTS:
        if part not in step:
            continue
        table = dict(state[part])
        for key, change in step[part].items():
            wanted, present = change[side], change[1 - side]
            if wanted is None:
                table.pop(key, None)
            elif present is None:
                table[key] = wanted
            else:
                table[key] = {**table[key], **wanted}
        result[part] = table
    order = step["order"][side] if "order" in step else None
    if "at" in step:
        order = [key for key in result["images"] if key not in step["at"]]
        places = {key: at[side] for key, at in step["at"].items() if at[side] is not None}
        order = _with_places(order, places)
    if order is not None:
        result["images"] = {key: result["images"][key] for key in order}
    return result


def _with_places(order: list[str], places: dict[str, int]) -> list[str]:
    """An order with more keys, each at its place in the result."""
    at = {place: key for key, place in places.items()}
    rest = iter(order)
    return [at[place] if place in at else next(rest) for place in range(len(order) + len(at))]


def images_of(step: Step) -> dict[str, dict[str, Any]]:
    """The images that a step adds or removes, by id."""
    changes = step.get("images", {}).items()
    return {key: old or new for key, (old, new) in changes if old is None or new is None}


def files_of(images: Iterable[Mapping[str, Any] | None]) -> set[tuple[str, str]]:
    """The files that images name, or one side of a step's changes of them: (field, name)."""
    return {(field, one[field]) for one in images if one for field in FILES if one.get(field)}


def files_of_step(step: Step) -> set[tuple[str, str]]:
    """The files that the images of a step name on either side: what undo and redo need of it."""
    return files_of(side for change in step.get("images", {}).values() for side in change)


def is_shown(step: Step) -> bool:
    """Whether a step changes something that a user sees: the images, or the captions that wait for one."""
    if "order" in step or "at" in step:
        return True
    if any(name in SHOWN for _, new in step.get("images", {}).values() for name in new):
        return True
    texts = step.get("texts", {}).values()
    return any(_waits(old, new, UNDO) != _waits(old, new, REDO) for old, new in texts)


def _waits(old: Any, new: Any, side: int) -> bool | None:
    """Whether a caption waits for its image on one side of a change; None where the change does not say."""
    value = (old, new)[side]
    return False if value is None else (None if "used" not in value else not value["used"])
