"""Parses PowerShell scripts: backticks continue lines and escape characters; `$name` is a variable, `@name` passes an array.

Only what is certain gets a value: a comma outside quotes makes several arguments, and text that follows a closing quote may
start another argument, so such words have the value None.
"""

import re
from dataclasses import dataclass, field

from presets.syntax import Command, Word

UNKNOWN = "\0"
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
ASSIGNMENT = re.compile(r"\$(?:(?:script|global|local|private):)?(\w+)[ \t]*(\+?=)(?!=)[ \t]*", re.IGNORECASE)
NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))(?![\w:])")


@dataclass
class _Item:
    """One word as written."""

    value: str | None
    start: int
    end: int
    shape: str
    counted: bool = True  # whether it is certainly one argument


@dataclass
class PowerShell:
    """Parses a script from start to end and tracks the variables and arrays whose values are known."""

    text: str
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[_Item]] = field(default_factory=dict)

    def commands(self) -> list[Command]:
        self.at = 1 if self.text.startswith("\ufeff") else 0
        self.depth = 0
        self.unclosed = False  # a quote has no end
        out: list[Command] = []
        words: list[Word] = []
        opaque = False
        while self.at < len(self.text):
            c = self.text[self.at]
            if self._skip_space():
                continue
            if not words and (assignment := ASSIGNMENT.match(self.text, self.at)):
                self._assign(assignment)
            elif c == "&" and not words and not self.text.startswith("&&", self.at):
                self.at += 1
            elif c in "\n;|&(){}":
                self.depth += {"{": 1, "}": -1}.get(c, 0)
                self.at += 1
                if words:
                    out.append(Command(words, opaque, self.unclosed))
                words, opaque = [], False
            elif redirection := re.compile(r"[0-9*]?(?:>>?(?:&[0-9])?|<)").match(self.text, self.at):
                self.at = redirection.end()
                while self.text[self.at : self.at + 1] in (" ", "\t"):
                    self.at += 1
                if not redirection.group()[-1].isdigit():
                    self._word()
            else:
                item = self._word()
                found = self._expand(item)
                opaque = opaque or found is None
                words += found or [Word(None, item.start, item.end, shape=item.shape)]
        if words:
            out.append(Command(words, opaque, self.unclosed))
        return out

    def _skip_space(self) -> bool:
        """Step over white space, continuations and comments; False when there are none."""
        found = re.compile(r"[ \t\r]+|`\r?(?:\n|\Z)|#[^\n]*|<#.*?(?:#>|\Z)", re.DOTALL).match(self.text, self.at)
        if found:
            self.at = found.end()
        return bool(found)

    def _assign(self, assignment: re.Match[str]) -> None:
        """Read `$NAME = …`. A value is known when it is one literal, and set at the top level."""
        name, operator = assignment.group(1).lower(), assignment.group(2)
        self.at = assignment.end()
        self.variables[name], before = None, self.variables.get(name)
        items = self.arrays.pop(name, None)
        if self.text.startswith("@(", self.at):
            self.at += 2
            new = self._array()
            if operator == "=" and not self.depth:
                self.arrays[name] = new
            elif items is not None and not self.depth:
                self.arrays[name] = items + new
            return
        if self.text[self.at : self.at + 1] not in ("'", '"') and not re.compile(r"[\w.-]").match(self.text, self.at):
            return  # an expression: what follows is read as commands of its own
        item = self._word()
        end = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|;|\Z|\})").match(self.text, self.at)
        literal = end and item.value is not None and item.counted
        if literal and not self.depth:
            number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", item.value or "", re.IGNORECASE)
            plain = self.text[item.start] in "'\""
            if plain:
                joined = None if before is None else before + (item.value or "")
                self.variables[name] = item.value if operator == "=" else joined
            elif number and operator == "=" and (item.value or "").isdigit():
                self.variables[name] = item.value

    def _array(self) -> list[_Item]:
        items: list[_Item] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._skip_space():
                continue
            if self.text[self.at] in "\n,;":
                self.at += 1
                continue
            item = self._word(in_array=True)
            if self.text[item.start] not in "'\"" and not re.fullmatch(r"\d+", item.shape):
                item = _Item(None, item.start, item.end, item.shape, counted=False)  # an expression
            items.append(item)
        self.at += 1
        return items

    def _word(self, in_array: bool = False) -> _Item:
        """The word at this position."""
        start, counted = self.at, True
        parts: list[str] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\r\n;|&(){}" or re.compile(r"`\r?(?:\n|\Z)").match(self.text, self.at):
                break
            if c in "<>" and not parts:
                self.at += 1
            elif in_array and c == ",":
                break
            elif self.text.startswith(("@'", '@"'), self.at) and self.at == start:
                quote = self.text[self.at + 1]
                end = self.text.find(f"\n{quote}@", self.at)
                self.at = len(self.text) if end < 0 else end + 3
                parts.append(UNKNOWN)
                counted = False
            elif c == "'":
                counted = counted and (self.at == start or not parts or self.text[start] not in "'\"")
                parts.append(self._single())
            elif c == '"':
                counted = counted and (self.at == start or not parts or self.text[start] not in "'\"")
                parts.append(self._double())
            elif c == "$":
                parts.append(self._variable())
                # PowerShell does not replace a variable in a word such as -x=$y or -x:$y.
                if re.match(r"-(?!-)", self.text[start : self.at]):
                    parts.append(UNKNOWN)
            elif c == "`":
                follows = self.text[self.at + 1 : self.at + 2]
                parts.append(ESCAPES.get(follows, follows))
                self.at += 2
            else:
                counted = counted and c != "," and not (parts and self.text[start] in "'\"" and self.at > start)
                parts.append(c)
                self.at += 1
        self.at = min(max(self.at, start + 1), len(self.text))
        shape = "".join(parts)
        return _Item(None if UNKNOWN in shape or not counted else shape, start, self.at, shape, counted)

    def _single(self) -> str:
        found = re.compile(r"'((?:[^']|'')*)'?").match(self.text, self.at)
        assert found
        self.at = found.end()
        self.unclosed = self.unclosed or len(found.group()) < 2 or not found.group().endswith("'")
        return found.group(1).replace("''", "'")

    def _double(self) -> str:
        self.at += 1
        parts: list[str] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if self.text.startswith('""', self.at):
                parts.append('"')
                self.at += 2
            elif c == '"':
                break
            elif c == "`":
                follows = self.text[self.at + 1 : self.at + 2]
                parts.append(ESCAPES.get(follows, follows))
                self.at += 2
            elif c == "$":
                parts.append(self._variable())
            else:
                parts.append(c)
                self.at += 1
        self.unclosed = self.unclosed or self.at >= len(self.text)
        self.at += 1
        return "".join(parts)

    def _variable(self) -> str:
        """The value of `$…`, or NUL where it is unknown."""
        if self.text.startswith("$(", self.at):
            depth = 0
            for i in range(self.at + 1, len(self.text)):
                depth += {"(": 1, ")": -1}.get(self.text[i], 0)
                if not depth:
                    self.at = i + 1
                    return UNKNOWN
            self.at = len(self.text)
            return UNKNOWN
        name = NAME.match(self.text, self.at)
        if name:
            self.at = name.end()
            if self.text[self.at : self.at + 1] in (".", "["):
                return UNKNOWN
            value = self.variables.get((name.group(1) or name.group(2)).lower())
            return UNKNOWN if value is None else value
        other = re.compile(r"\$(?:\{[^}\n]*\}|[\w:]+|[$?^_])").match(self.text, self.at)
        self.at = other.end() if other else self.at + 1
        return UNKNOWN if other else "$"

    def _expand(self, item: _Item) -> list[Word] | None:
        """The arguments that a word stands for; None when their number is unknown."""
        written = self.text[item.start : item.end]
        name = re.fullmatch(r"[@$](\w+)", written)
        if name and name.group(1).lower() in self.arrays:
            items = self.arrays[name.group(1).lower()]
            if not all(i.counted for i in items):
                return None
            once = len(re.findall(rf"[@$]{name.group(1)}\b", self.text, re.IGNORECASE)) == 2  # set, and used here
            return [
                Word(i.value, item.start, item.end, once, i.shape, (i.start, i.end) if once else None,
                     None if i.value is None else quote(i.value)) for i in items
            ]  # fmt: skip
        if not item.counted or (name and item.value is None) or written.startswith(("@", "--%")):
            return None
        return [Word(item.value, item.start, item.end, shape=item.shape)]


def quote(value: str) -> str:
    """A value as PowerShell reads it."""
    return value if re.fullmatch(r"[A-Za-z_./:\\=+0-9-]+", value) else literal(value)


def literal(value: str) -> str:
    """A value as a string of an expression, where a word without quotes would be a command."""
    return "'" + value.replace("'", "''") + "'"
