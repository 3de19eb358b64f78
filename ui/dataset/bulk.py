"""Edits of many captions at once: each is a function from a caption to a caption, applied to the chosen images as one step.

An edit arrives as a table from the browser or the API, such as {"kind": "replace", "find": "cat", "with": "dog"}. A
pattern is searched with the `regex` package, whose search stops after a time: Python's own `re` can need hours for a
hostile pattern, and nothing can interrupt it.
"""

import contextlib
import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runs.files import RunError
from ui.dataset import draft
from ui.dataset.draft_store import MAX_CAPTION, plain_text, read

MAX_TEXT = 2_000  # characters of a field of an edit
PATTERN_S = 3.0  # for all captions together; 10,000 of them take a tenth of a second
MAX_REPEATED = 10_000
EXAMPLES = 4
Edit = Callable[[str, str], str]  # (caption, image id) → caption; OverflowError: it would be longer than MAX_CAPTION


@dataclass(frozen=True)
class Kind:
    """A kind of edit. label: its name on the page; make: the edit from its checked fields; done: what undo calls it, see
    draft.change_images."""

    label: str
    make: Callable[[Mapping[str, Any]], Edit]
    done: str


def tags_of(caption: str) -> list[str]:
    """The tags of a caption: what stands between its commas."""
    return [tag for part in caption.split(",") if (tag := " ".join(part.split()))]


# The kinds -----------------------------------------------------------------------------------------------------------


def _text(fields: Mapping[str, Any], name: str, needed: bool = True) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise RunError(draft.OUT_OF_DATE)
    value = plain_text(value)
    if len(value) > MAX_TEXT:
        raise RunError(f"This text has {len(value)} characters; shorten it to {MAX_TEXT}")
    if needed and not value.strip(" " if name != "find" else ""):
        raise RunError(
            {"find": "Type the text to find", "tags": "Type a tag to remove"}.get(name, "Type the text to add")
        )
    return value


def _prefix(fields: Mapping[str, Any]) -> Edit:
    text = _text(fields, "text")
    alone = text.strip().rstrip(",").rstrip()
    return lambda caption, _: caption if caption.startswith(alone) else text + caption if caption.strip() else alone


def _suffix(fields: Mapping[str, Any]) -> Edit:
    text = _text(fields, "text")
    alone = text.strip().lstrip(",").lstrip()
    return lambda caption, _: caption if caption.endswith(alone) else caption + text if caption.strip() else alone


def _replace(fields: Mapping[str, Any]) -> Edit:
    import regex

    find, replacement = _text(fields, "find"), _text(fields, "with", needed=False)
    is_pattern, any_case = fields.get("pattern") is True, fields.get("any_case") is True
    # The compiler writes out what is repeated: (?:a{3000}){3000} takes gigabytes.
    repeats = math.prod(max(1, int(number[:9])) for number in re.findall(r"\{\s*([0-9]+)", find)) if is_pattern else 1
    if repeats > MAX_REPEATED:
        raise RunError(f"Find: the numbers in braces multiply to more than {MAX_REPEATED}; lower them")
    try:
        pattern = regex.compile(find if is_pattern else regex.escape(find), regex.IGNORECASE if any_case else 0)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise RunError(f"Find: not a valid regular expression ({error}); correct it") from error
    left_s = PATTERN_S  # for the search alone: the change may have to wait for one of another process first

    def edit(caption: str, _: str) -> str:
        nonlocal left_s
        began_s = time.monotonic()
        parts, size, at = [], 0, 0
        try:
            if left_s <= 0:
                raise TimeoutError
            # Not `sub`: a replacement can repeat a group, and the result is measured before the memory is full.
            for found in pattern.finditer(caption, timeout=left_s, concurrent=True):
                piece = found.expand(replacement) if is_pattern else replacement
                parts += [caption[at : found.start()], piece]
                size, at = size + found.start() - at + len(piece), found.end()
                if size > MAX_CAPTION:
                    raise OverflowError
        except TimeoutError as error:
            raise RunError(
                f"Find: this regular expression needs more than {PATTERN_S:.0f} s; simplify it. Nested repetitions such as "
                "(a|aa)+ are the usual cause"
            ) from error
        except (regex.error, IndexError) as error:
            raise RunError(f"Replace with: {error}; groups are \\1, \\2 or \\g<name>, a backslash is \\\\") from error
        finally:
            left_s -= time.monotonic() - began_s
        return "".join(parts) + caption[at:] if parts else caption

    return edit


def _remove_tags(fields: Mapping[str, Any]) -> Edit:
    unwanted = {tag.casefold() for tag in tags_of(_text(fields, "tags"))}
    if not unwanted:
        raise RunError("Type a tag to remove")

    def edit(caption: str, _: str) -> str:
        tags = tags_of(caption)
        kept = [tag for tag in tags if tag.casefold() not in unwanted]
        return caption if len(kept) == len(tags) else ", ".join(kept)

    return edit


def _shuffle(fields: Mapping[str, Any]) -> Edit:
    keep, seed = fields.get("keep", 1), fields.get("seed", 0)
    if not isinstance(keep, int) or not isinstance(seed, int) or not 0 <= keep <= 1000 or abs(seed) > 2**53:
        raise RunError("Tags to keep in place: use a whole number from 0 to 1000")

    def edit(caption: str, image_id: str) -> str:
        tags = tags_of(caption)
        rest = tags[keep:]
        # The same for a preview and for what it previews, and different for each image.
        draw = random.Random(hashlib.sha256(f"{seed}/{image_id}".encode()).digest())
        draw.shuffle(rest)
        return ", ".join(tags[:keep] + rest) if rest != tags[keep:] else caption

    return edit


KINDS: dict[str, Kind] = {
    "replace": Kind("Find and replace", _replace, "replacement in {captions}"),
    "prefix": Kind("Add text before", _prefix, "text before {captions}"),
    "suffix": Kind("Add text after", _suffix, "text after {captions}"),
    "remove_tags": Kind("Remove tags", _remove_tags, "removal of tags from {captions}"),
    "shuffle": Kind("Shuffle tags", _shuffle, "shuffled tags in {captions}"),
}


# Use -----------------------------------------------------------------------------------------------------------------


def _kind(fields: Mapping[str, Any]) -> Kind:
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise RunError(f"There is no edit {kind!r}; use one of {', '.join(KINDS)}")
    return KINDS[kind]


def _edited(edit: Edit, key: str, entry: draft.Entry) -> str:
    """The caption of an image after an edit. Raises RunError: the edit fails for it; the message names its file."""
    with contextlib.suppress(OverflowError):
        text = edit(entry["caption"], key)
        if len(text) <= MAX_CAPTION:
            return text
    raise RunError(f"{entry['file']}: the caption would have more than {MAX_CAPTION} characters; shorten it first")


def preview(draft_id: str, ids: Iterable[str] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an edit would do: {"changed", "of", "examples": [{"file", "before", "after"}, …]}. Args and errors: as `apply`."""
    images, edit = read(draft_id)["images"], _kind(fields).make(fields)
    before = {key: images[key] for key in (images if ids is None else ids) if key in images}
    after = {key: _edited(edit, key, entry) for key, entry in before.items()}
    changed = [
        {"file": entry["file"], "before": entry["caption"], "after": after[key]}
        for key, entry in before.items()
        if after[key] != entry["caption"]
    ]
    return {"changed": len(changed), "of": len(before), "examples": changed[:EXAMPLES]}


def apply(draft_id: str, ids: Iterable[str] | None, fields: Mapping[str, Any]) -> int:
    """Edit captions as one step that can be undone. Returns how many captions changed.

    Args:
        ids: the images, or None for all; removed ones are left out.
        fields: "kind" (a key of KINDS) and its fields: "text" (prefix, suffix); "find", "with", "pattern" and
            "any_case" (replace); "tags", separated by commas (remove_tags); "keep", the tags that stay in place, and
            "seed" (shuffle).

    Raises:
        RunError: a field is missing or invalid, the pattern takes too long, or a caption would be too long. Nothing changed.
    """
    kind = _kind(fields)
    edit = kind.make(fields)
    return draft.change_images(
        draft_id, ids, lambda key, entry: draft.captioned(entry, _edited(edit, key, entry)), kind.done
    )
