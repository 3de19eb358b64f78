"""A script's commands and words, with their places in the source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """One argument as the program gets it: its value (None: cannot be known) and the source it comes from.

    Words that a variable expands to share the place of that variable; `alone` is False for these.
    """

    value: str | None
    start: int
    end: int
    alone: bool = True
    shape: str = ""  # the value, with a NUL for each part of it that is unknown


@dataclass
class Command:
    """A simple command: its words, and whether something in it stands for an unknown number of words."""

    words: list[Word]
    opaque: bool = False

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end
