"""What a model answered, as a caption: one line of plain text within a limit, with the prefix, suffix and trigger word."""

import re
import unicodedata

from runs.dataset import one_line

MOST_CHARACTERS = 2_000
JOINER = "\u200d"  # part of some emoji and scripts
THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
FENCE = re.compile(r"\A\s*```[a-z]*\n(.*?)\n?```\s*\Z", re.DOTALL)
QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "`": "`"}


class NoCaption(Exception):
    """Why an image has no caption. fatal: the next image would have none either; pause_s: another request after this
    time can succeed."""

    def __init__(self, reason: str, fatal: bool = False, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.fatal, self.pause_s = fatal, pause_s


def cleaned(answer: object) -> str:
    """The caption in an answer: without a model's thoughts, code fences, quotes around it, control and format
    characters. Raises NoCaption: nothing is left, or it is longer than MOST_CHARACTERS."""
    if not isinstance(answer, str):
        raise NoCaption("the answer is not text")
    text = THOUGHT.sub(" ", answer.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    if fenced := FENCE.match(text):
        text = fenced[1]
    text = one_line("".join(_plain(character) for character in text))
    while len(text) > 1 and QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    if not text:
        raise NoCaption("the answer is empty")
    if len(text) > MOST_CHARACTERS:
        raise NoCaption(
            f"the answer has {len(text):,} characters; a caption can have {MOST_CHARACTERS:,}. Ask for a shorter one"
        )
    return text


def _plain(character: str) -> str:
    """A space for control characters and line ends, "" for invisible ones that change how text is shown or read."""
    kind = unicodedata.category(character)
    if kind in ("Cc", "Zl", "Zp", "Zs"):
        return " "
    return "" if kind in ("Cf", "Co", "Cs", "Cn") and character != JOINER else character


def framed(caption: str, prefix: str = "", suffix: str = "", trigger: str = "") -> str:
    """The caption with its prefix and suffix, and with the trigger word first unless it starts with it."""
    text = one_line(f"{prefix}{caption}{suffix}")
    word = one_line(trigger)
    starts = word and text.casefold().startswith(word.casefold()) and not text[len(word) : len(word) + 1].isalnum()
    return text if not word or starts else f"{word}, {text}"
