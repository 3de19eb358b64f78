"""Undo and redo: the difference between two states of a draft, as a table that JSON can hold.

A step keeps what changed on both sides, not whole states, because a caption among 10,000 must not cost 10,000 captions
of disk. Steps are undone in reverse order only, so each finds the state that it left behind.
"""

from collections.abc import Collection, Mapping
from typing import Any

PARTS = ("images", "texts")  # the tables of a draft that can be undone, both from a key to a flat table
UNDO, REDO = 0, 1
# What a user sees of an image. A change of other fields, such as where it came from, is stored without a step.
SHOWN = ("caption", "turn", "file", "folder", "crop", "mask", "weight", "stored")
State = dict[str, Any]
Step = dict[str, Any]


def difference(before: State, after: State) -> Step:
    """The step from one state to another; empty when they are equal.

    Each changed key has [before, after]: None where it does not exist, else the values that differ. "places": where the
    orders of the images differ: the first place, and the ids from there to the last such place, before and after.
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
    old_order, new_order = list(before["images"]), list(after["images"])
    if old_order != new_order:
        most = min(len(old_order), len(new_order))
        first = next((n for n in range(most) if old_order[n] != new_order[n]), most)
        same = next((n for n in range(most - first) if old_order[-1 - n] != new_order[-1 - n]), most - first)
        step["places"] = [first, *(order[first : len(order) - same] for order in (old_order, new_order))]
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
    if "places" in step:
        first, *sides = step["places"]
        order, images = list(state["images"]), result["images"]
        order[first : first + len(sides[1 - side])] = sides[side]
        # A step that an older version stored says nothing of places, so the order can differ: no image may be lost.
        result["images"] = {key: images[key] for key in dict.fromkeys([*order, *images]) if key in images}
    return result


def images_of(step: Step) -> dict[str, dict[str, Any]]:
    """The images that a step adds or removes, by id."""
    changes = step.get("images", {}).items()
    return {key: old or new for key, (old, new) in changes if old is None or new is None}


def files_of(images: Collection[tuple[str, Mapping[str, Any] | None]]) -> set[tuple[str, str]]:
    """The files of the draft that images need, from (id, entry) each: (kind, name); that of a "thumb" begins with the id."""
    found = {(kind, one[kind]) for _, one in images if one for kind in ("stored", "mask") if one.get(kind)}
    return found | {("thumb", key) for key, one in images if one and "stored" in one}


def files_of_step(step: Step) -> set[tuple[str, str]]:
    """The files that undo and redo of a step need."""
    return files_of([(key, side) for key, change in step.get("images", {}).items() for side in change])


def is_shown(step: Step) -> bool:
    """Whether a step changes something that a user sees: the images, or the captions that wait for one."""
    if "places" in step or any(name in SHOWN for _, new in step.get("images", {}).values() for name in new):
        return True
    texts = step.get("texts", {}).values()
    return any("used" in new if old and new else not (old or new)["used"] for old, new in texts)
