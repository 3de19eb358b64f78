"""Which images of a draft are shown: by what is wrong with them, by their caption, tag and subset; and its tags with counts."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runs.files import RunError
from ui.dataset import draft
from ui.dataset.bulk import tags_of
from ui.dataset.draft import Item

MAX_TEXT = 1_000  # characters
MAX_TAGS = 400  # in the overview


def _has(code: str) -> Callable[[Item], bool]:
    return lambda item: code in item.warnings


FILTERS: dict[str, Callable[[Item], bool]] = {
    "": lambda item: True,
    "no_caption": lambda item: not item.caption.strip(),
    "warned": lambda item: any(code != "no_caption" for code in item.warnings),
    "small": _has("small"),
    "near": _has("near"),
    "sideways": _has("sideways"),
    "model": lambda item: item.caption_by == "model",
    "edited": lambda item: bool(item.crop or item.mask or item.weight != 1),
}
# How a text is compared with a caption, by name.
COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "contains": lambda text, caption: text in caption.casefold(),
    "lacks": lambda text, caption: text not in caption.casefold(),
    "tag": lambda text, caption: text in caption.casefold() and text in map(str.casefold, tags_of(caption)),
    "no_tag": lambda text, caption: text not in caption.casefold() or text not in map(str.casefold, tags_of(caption)),
}


@dataclass(frozen=True)
class Query:
    """Which images to show. kind: a key of FILTERS; how, text: a key of COMPARISONS and its text; folder: a subset, or None."""

    kind: str = ""
    how: str = "contains"
    text: str = ""
    folder: str | None = None

    def found(self, items: list[Item]) -> list[Item]:
        """The items to show, in their order; `items` itself for all."""
        if self == Query(how=self.how):
            return items
        of_kind, compare = FILTERS.get(self.kind, FILTERS[""]), COMPARISONS.get(self.how, COMPARISONS["contains"])
        text = " ".join(self.text.split()).casefold() if self.how in ("tag", "no_tag") else self.text.casefold()
        return [
            item
            for item in items
            if of_kind(item)
            and (self.folder is None or item.folder == self.folder)
            and (not text or compare(text, item.caption))
        ]


def query_of(data: Mapping[str, Any]) -> Query:
    """The query that a browser sent as "query", a table of the fields of Query; unknown values show all images. Raises
    RunError: the text is too long."""
    sent = data.get("query")
    known = {name: sent.get(name) for name in Query.__annotations__} if isinstance(sent, dict) else {}
    query = Query(**{name: draft.plain_text(value) for name, value in known.items() if isinstance(value, str)})
    if len(query.text) > MAX_TEXT:
        raise RunError(f"The text to search for has {len(query.text)} characters; shorten it to {MAX_TEXT}")
    return query


def ids(draft_id: str, query: Query, between: list[str] | None = None) -> list[str]:
    """The ids of the images that a query finds; with `between`, only those from one image to another, in either order.
    Raises RunError: the query does not find one of the two."""
    found = [item.id for item in query.found(draft.items(draft_id))]
    if between is None:
        return found
    places = sorted(found.index(one) for one in between[:3] if one in found)
    if len(places) != 2:
        raise RunError("One of these images is no longer shown; select the images again")
    return found[places[0] : places[1] + 1]


def tags(draft_id: str) -> dict[str, Any]:
    """How often each tag occurs in the captions: {"tags": [[tag, captions], …], "total": different tags}.

    Tags that differ only in case are one, as in the edits. The most frequent ones are first, at most MAX_TAGS.
    """
    counted: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for item in draft.items(draft_id):
        own = {tag.casefold(): tag for tag in tags_of(item.caption)}
        counted.update(own.keys())
        for key, tag in own.items():
            shown.setdefault(key, tag)
    most = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_TAGS]
    return {"tags": [[shown[key][:200], number] for key, number in most], "total": len(counted)}
