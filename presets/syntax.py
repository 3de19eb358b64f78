"""The commands and words of a script, with their positions in its text."""

from dataclasses import dataclass

from presets.tables import PresetError

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
class Filled:
    """Counts what the variables of a script are replaced by: 40 lines such as `a=$a$a` would take all memory."""

    left: int = 1_000_000  # characters

    def __call__(self, value: str) -> str:
        """The value. PresetError: the values are longer together than any script needs."""
        self.left -= len(value)
        if self.left < 0:
            raise PresetError("its variables stand for more than 1,000,000 characters")
        return value


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
        """Where its first word begins."""
        return self.words[0].start

    @property
    def end(self) -> int:
        """Where its last word ends."""
        return self.words[-1].end
