"""The commands and words of a script, with their positions in its text."""

import re
from dataclasses import dataclass, field

UNKNOWN = "\0"


@dataclass(frozen=True)
class Word:
    """One argument as the program receives it, and where the command has it: text[start:end].

    `shape` has a NUL for each part that cannot be known without running the script. `alone`: whether this text is this
    word and no more; words that come from one variable or array share its position.
    """

    shape: str
    start: int
    end: int
    alone: bool = True

    @property
    def value(self) -> str | None:
        """None where a part of it is unknown."""
        return None if UNKNOWN in self.shape else self.shape


@dataclass
class Command:
    """A simple command.

    `opaque`: a part of it stands for an unknown number of words. `unclosed`: a quote in it has no end.
    """

    words: list[Word]
    opaque: bool = False
    unclosed: bool = False

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


@dataclass
class Fields:
    """The words that one written word becomes: a variable outside quotes may fall into several."""

    words: list[str] = field(default_factory=list)
    open: bool = False  # whether the next text continues the last word

    def add(self, text: str) -> None:
        """Add text that stays together."""
        if self.open:
            self.words[-1] += text
        else:
            self.words.append(text)
        self.open = True

    def split(self, text: str) -> None:
        """Add text that white space separates."""
        for part in re.split(r"(\s+)", text):
            if part.isspace():
                self.open = False
            elif part:
                self.add(part)
