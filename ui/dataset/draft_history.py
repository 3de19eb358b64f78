"""Undo and redo: the difference between two states of a draft, as a table that JSON can hold.

A step keeps what changed on both sides, not whole states, because a caption among 1,200 must not cost 1,200 captions of
disk. Steps are undone in reverse order only, so each finds the state that it left behind.
"""

from typing import Any

PARTS = ("images", "texts")  # the tables of a draft that can be undone, both from a key to a flat table
UNDO, REDO = 0, 1
State = dict[str, Any]
Step = dict[str, Any]


def difference(before: State, after: State) -> Step:
    """The step from one state to another; empty when they are equal.

    Each changed key has [before, after]: None where it does not exist, else the values that differ.
    """
    step: Step = {}
    for part in PARTS:
        changes = {}
        for key in {**before[part], **after[part]}:
            old, new = before[part].get(key), after[part].get(key)
            if old is not None and new is not None:
                names = [name for name in new if old.get(name) != new[name]]
                old, new = ({name: table[name] for name in names} for table in (old, new))
            if old != new:
                changes[key] = [old, new]
        if changes:
            step[part] = changes
    orders = [list(before["images"]), list(after["images"])]
    if orders[UNDO] != orders[REDO]:
        step["order"] = orders
    return step


def applied(state: State, step: Step, side: int) -> State:
    """The state before a step (`side` UNDO) or after it (REDO), from the state on the other side."""
    result = dict(state)
    for part in PARTS:
        table = dict(state[part])
        for key, change in step.get(part, {}).items():
            wanted, present = change[side], change[1 - side]
            if wanted is None:
                table.pop(key, None)
            elif present is None:
                table[key] = wanted
            else:
                table[key] = {**table[key], **wanted}
        result[part] = table
    if "order" in step:
        result["images"] = {key: result["images"][key] for key in step["order"][side]}
    return result


def images_of(step: Step) -> dict[str, dict[str, Any]]:
    """The images that a step adds or removes, by id."""
    changes = step.get("images", {}).items()
    return {key: old or new for key, (old, new) in changes if old is None or new is None}
