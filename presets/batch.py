"""Parses Windows batch files: carets continue lines and escape characters; `%NAME%` is a variable of `set`.

cmd replaces variables before it reads a line, so a value with spaces outside quotes becomes several words. Brackets only
group commands at the start of a command or after `if`, `for` and `else`; elsewhere they are part of a word.
"""

import re
from dataclasses import dataclass, field

from presets.syntax import Command, Fields, Word

UNKNOWN = "\0"
BLOCKS = {"if", "for", "else"}
REMARK = re.compile(r"[ \t@(]*(?:rem(?=[ \t\r\n^]|$)|:)", re.IGNORECASE)
SET = r'set[ \t]+(?!/)(?:"([^"=\n]+)=([^"\n]*)"|([^"=\n]+)=([^\n&|]*))'
ASSIGNMENT = re.compile(r"[ \t@(]*" + SET, re.IGNORECASE)
# A variable that a person types, or that is set on a condition or in a loop, has no known value.
CONDITIONAL = re.compile(r'[^\s(@][^\n]*?\bset[ \t]+"?(\w+)=|\bset[ \t]+/[ap][ \t]+"?(\w+)', re.IGNORECASE)
VARIABLE = re.compile(r"%(?:(\w+)|[\w()]+:[^%\r\n]*|(?:~[\w$:]*)?([0-9*]))%?")


@dataclass
class Batch:
    """Parses a batch file from start to end and tracks the variables that it sets."""

    text: str
    variables: dict[str, str | None] = field(default_factory=dict)

    def commands(self) -> list[Command]:
        self.at = 0
        self.depth = 0
        self.unclosed = False  # a quote of this command has no end
        self.delayed = bool(re.search(r"enabledelayedexpansion", self.text, re.IGNORECASE))
        self.loops = {f"%%{letter}" for letter in re.findall(r"\bfor\b[^\n]*?%%(\w)", self.text, re.IGNORECASE)}
        self.unknown = {name.lower() for pair in CONDITIONAL.findall(self.text) for name in pair if name}
        out: list[Command] = []
        while self.at < len(self.text):
            if self.text[self.at] == "\ufeff":
                self.at += 1
            self._line(out)
        return out

    def _line(self, out: list[Command]) -> None:
        """Read one line with its continuations."""
        if REMARK.match(self.text, self.at):
            return self._next_line()
        if assignment := ASSIGNMENT.match(self.text, self.at):
            quoted, value, plain, rest = assignment.groups()
            known = self._replaced(value if quoted else rest.rstrip("\r"))
            name = (quoted or plain).strip().lower()
            self.variables[name] = None if self.depth or UNKNOWN in known or name in self.unknown else known
            self.at = assignment.end()
        words: list[Word] = []
        opaque = False
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n":
                self.at += 1
                break
            if continuation := self._continuation():
                self.at += continuation
            elif c in " \t\r" or (c == "@" and not words):
                self.at += 1
            elif c in "&|" or (c == ")" and self.depth) or (c == "(" and self._opens(words)):
                self.depth += {"(": 1, ")": -1}.get(c, 0)
                self.at += 1
                self._finish(words, opaque, out)
                words, opaque = [], False
            elif redirection := re.compile(r"[0-9]?(?:>>?|<)(?:&[0-9])?").match(self.text, self.at):
                self.at = redirection.end()
                while self.text[self.at : self.at + 1] in (" ", "\t"):
                    self.at += 1
                if not redirection.group().endswith(tuple("0123456789")):
                    self._word()
            else:
                found, counted = self._word()
                words += found
                opaque = opaque or not counted
        self._finish(words, opaque, out)

    def _finish(self, words: list[Word], opaque: bool, out: list[Command]) -> None:
        if words:
            out.append(Command(words, opaque, self.unclosed))
        self.unclosed = False

    def _opens(self, words: list[Word]) -> bool:
        return not words or (words[0].value or "").lower() in BLOCKS

    def _next_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end + 1

    def _continuation(self) -> int:
        """The length of a caret with the end of its line (or of the file); 0 if there is none."""
        found = re.compile(r"\^\r?(?:\n|\Z)").match(self.text, self.at)
        return len(found.group()) if found else 0

    def _replaced(self, text: str) -> str:
        """A text with its variables replaced by their values, or by NUL where they are unknown."""
        text = VARIABLE.sub(lambda m: self._value(m) or UNKNOWN, text.replace("%%", "\1"))
        return text.replace("\1", "%")

    def _value(self, found: re.Match[str]) -> str | None:
        name = found.group(1)
        return self.variables.get(name.lower()) if name and found.group().endswith("%") else None

    def _word(self) -> tuple[list[Word], bool]:
        """The words that are written as one word here, and whether their number is known."""
        start, quoted, caret_quoted, counted, backslashes = self.at, False, False, True, 0
        fields = Fields()
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n" or (not quoted and self._continuation()):
                break
            if c == '"' or (not quoted and self.text.startswith('^"', self.at)):
                self.at += 1 if c == '"' else 2
                fields.add("")
                if backslashes:
                    fields.words[-1] = fields.words[-1][: -((backslashes + 1) // 2)]
                if backslashes % 2:
                    fields.add('"')
                elif c == '"':
                    quoted = not quoted
                else:
                    caret_quoted = not caret_quoted
                backslashes = 0
                continue
            protected = quoted or caret_quoted
            if c == "^" and not quoted:
                self.at += 1
                c = self.text[self.at : self.at + 1]
                fields.add(c)
            elif self.delayed and (name := re.compile(r"!\w+!").match(self.text, self.at)):
                fields.add(UNKNOWN)
                self.at = name.end() - 1
            elif self.text.startswith("%%", self.at):
                loop = self.text[self.at : self.at + 3] in self.loops
                counted = counted and (protected or not loop)
                fields.add(UNKNOWN if loop else "%")
                self.at += 2 if loop else 1
            elif c == "%" and (found := VARIABLE.match(self.text, self.at)):
                value = self._value(found)
                if value is None:
                    counted = counted and protected and found.group(2) != "*"
                    fields.add(UNKNOWN)
                elif protected:
                    fields.add(value)
                else:
                    self._split(value, fields)
                self.at = found.end() - 1
            elif not protected and (c in " \t\r&|<>" or (c == ")" and self.depth)):
                break
            elif c != "\r" or self.text[self.at + 1 : self.at + 2] != "\n":
                fields.add(c)
            backslashes = backslashes + 1 if c == "\\" else 0
            self.at += 1
        self.at = min(max(self.at, start + 1), len(self.text))
        self.unclosed = self.unclosed or quoted or caret_quoted
        alone = len(fields.words) == 1
        known = [None if UNKNOWN in f else f for f in fields.words]
        return [
            Word(value, start, self.at, alone, f, raw=None if value is None else quote(value))
            for value, f in zip(known, fields.words, strict=True)
        ], counted

    def _split(self, value: str, fields: Fields) -> None:
        """Add a variable's value, which cmd reads again: its quotes group, and its spaces separate words."""
        for i, part in enumerate(value.split('"')):
            if i % 2:
                fields.add(part)
            else:
                fields.split(part)


def quote(value: str) -> str:
    """A value as cmd and the program that it starts read it."""
    if re.fullmatch(r"[\w./:\\=+,-]+", value):
        return value
    return '"' + re.sub(r"(\\+)$", r"\1\1", value.replace("%", "%%").replace('"', '\\"')) + '"'
