"""The images of a draft as the page shows them. They are kept until the draft changes, because a page of twelve cards
must not build those of 10,000 images again.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import presets
from runs.pictures import cropped_size
from ui.dataset import draft_images
from ui.dataset.draft_images import Entry
from ui.dataset.draft_store import MAX_OPEN, lock, read


@dataclass(frozen=True)
class Item:
    """One image of a draft.

    file: its name in its folder. folder: the relative path of the dropped folder it came from, "" for none. width,
    height: pixels as shown, before the crop. warnings: codes, see draft_images.warnings_of. crop: left, top, right,
    bottom as fractions of the image as shown. mask: the name of a file in the draft's `masks/`. weight: 1 to 10.
    caption_by:
    who wrote the caption: "person", "file", "model", or "" where nobody did.
    """

    id: str
    file: str
    folder: str
    width: int
    height: int
    caption: str
    sha256: str
    warnings: tuple[str, ...]
    turn: int = 0  # quarter turns clockwise that the user added
    crop: tuple[float, float, float, float] | None = None
    mask: str | None = None
    weight: int = 1
    caption_by: str = ""

    @property
    def trained_size(self) -> tuple[int, int]:
        """Width and height in pixels of what is trained: after the crop."""
        return cropped_size((self.width, self.height), self.crop)


# Of the drafts used last: their images as stored, the limit of small ones, their items, and what finds nearly identical ones.
_items: OrderedDict[str, tuple[Mapping[str, Entry], float, list[Item], draft_images.Near]] = OrderedDict()


def items(draft_id: str) -> list[Item]:
    """The images in display order. Do not change the list: it is shared."""
    with lock:
        images, small_side = read(draft_id)["images"], presets.defaults()["images"]["small_side"]
        known = _items.get(draft_id)
        if known is None or known[0] is not images or known[1] != small_side:
            finder = known[3] if known else draft_images.Near()
            near = finder.of(images)
            before = {item.id: item for item in known[2]} if known and known[1] == small_side else {}
            entries = known[0] if known else {}
            found = []
            for key, entry in images.items():
                item, other = before.get(key), near.get(key)
                same = item is not None and entries.get(key) is entry and _near_of(item) == other
                found.append(item if item and same else _item(key, entry, other, small_side))
            _items[draft_id] = known = images, small_side, found, finder
        _items.move_to_end(draft_id)
        while len(_items) > MAX_OPEN:
            _items.popitem(last=False)
        return known[2]


def _near_of(item: Item) -> str | None:
    return next((code.partition(":")[2] for code in item.warnings if code.startswith("near:")), None)


def _item(key: str, entry: Entry, near: str | None, small_side: int) -> Item:
    size = (entry["width"], entry["height"])
    width, height = reversed(size) if entry["turn"] % 2 else size
    crop = tuple(entry["crop"]) if entry["crop"] else None
    used_width, used_height = cropped_size((width, height), crop)
    used = {**entry, "width": used_width, "height": used_height}
    return Item(
        id=key,
        file=entry["file"],
        folder=entry["folder"],
        width=width,
        height=height,
        caption=entry["caption"],
        sha256=entry["sha256"],
        warnings=draft_images.warnings_of(used, near, small_side),
        turn=entry["turn"],
        crop=crop,
        mask=entry["mask"],
        weight=entry["weight"],
        caption_by=entry["caption_by"],
    )
