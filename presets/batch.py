"""Read a Windows batch file: carets continue lines and escape, `%NAME%` is what `set` said."""

import re
from dataclasses import dataclass, field

from presets.words import Command, Word


@dataclass
class Batch:
    """Reads a batch file once, from front to end, keeping the variables that it sets."""

    text: str
    variables: dict[str, str] = field(default_factory=dict)

    def commands(self) -> list[Command]:
        out: list[Command] = []
        at = 0
        while at < len(self.text):
            end = at
            while True:
                stop = self.text.find("\n", end)
                stop = len(self.text) if stop < 0 else stop
                if not self.text[at:stop].rstrip("\r").endswith("^") or stop == len(self.text):
                    break
                end = stop + 1
            self._line(at, stop, out)
            at = stop + 1
        return out

    def _line(self, start: int, end: int, out: list[Command]) -> None:
        head = self.text[start:end].lstrip(" \t@")
        if re.match(r"rem\b|::|:", head, re.IGNORECASE):
            return
        assignment = re.match(r'set\s+"?(\w+)=([^"\r]*)"?', head, re.IGNORECASE)
        if assignment:
            self.variables[assignment.group(1).lower()] = assignment.group(2)
            return
        words: list[Word] = []
        at = start
        while at < end:
            if self.text[at] in " \t\r\n" or re.match(r"\^\r?\n", self.text[at:end]):
                at += 1
            elif self.text[at] in "&|()":
                if words:
                    out.append(Command(words))
                words, at = [], at + 1
            elif re.match(r"[0-9]?[<>]", self.text[at:end]):
                at += self.text[at].isdigit()
                at = self._word(at + 1 + (self.text[at + 1 : at + 2] in "&>"), end).end
            else:
                word = self._word(at, end)
                words.append(word)
                at = max(word.end, at + 1)
        if words:
            out.append(Command(words))

    def _word(self, at: int, end: int) -> Word:
        while at < end and self.text[at] in " \t":
            at += 1
        start, parts, caret_quoted, quoted = at, [], False, False
        while at < end:
            c = self.text[at]
            if c == "^" and not quoted:
                if re.match(r"\^\r?\n", self.text[at:end]):
                    break
                escaped = self.text[at + 1 : at + 2]
                if escaped == '"' and not (parts and parts[-1] == "\\"):
                    caret_quoted = not caret_quoted
                elif escaped == '"':
                    parts[-1] = '"'
                else:
                    parts.append(escaped)
                at += 2
            elif c == '"':
                if parts and parts[-1] == "\\":
                    parts[-1] = '"'
                else:
                    quoted = not quoted
                at += 1
            elif c == "%":
                name = re.match(r"%(\w+)%", self.text[at:end])
                if name:
                    value = self.variables.get(name.group(1).lower())
                    parts.append("\0" if value is None else value)
                    at += name.end()
                else:
                    parts.append("%")
                    at += 2 if self.text.startswith("%%", at) else 1
            elif not quoted and not caret_quoted and c in " \t\r\n&|<>()":
                break
            else:
                parts.append(c)
                at += 1
        shape = "".join(parts)
        return Word(None if "\0" in shape else shape, start, min(at, end), shape=shape)
