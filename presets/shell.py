"""Find the commands in a script, with the place of every word, so that a mend can change one and keep all other bytes.

Not a shell: it reads what people's training scripts are made of (quotes, line continuations, comments, here-documents,
redirections, plain variables and arrays for bash; carets, quotes and `set` for batch files). What it cannot know (the
output of a command, a variable from outside) is a word whose value is None, never a guess.
"""

import re
from dataclasses import dataclass, field

from presets.batch import Batch
from presets.words import Command, Word

RESERVED = {
    "if",
    "then",
    "elif",
    "else",
    "do",
    "while",
    "until",
    "{",
    "}",
    "!",
    "time",
    "fi",
    "done",
    "case",
    "esac",
    "for",
}
UNKNOWN = "\0"
SETTERS = {"export", "declare", "local", "readonly", "typeset"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


def dialect(name: str, text: str) -> str:
    """`cmd` for batch files, else `sh`."""
    batch = name.lower().endswith((".bat", ".cmd")) or re.match(r"\s*@?echo off", text, re.IGNORECASE)
    return "cmd" if batch else "sh"


def commands(text: str, language: str) -> list[Command]:
    """The commands of a script, in order."""
    return Batch(text).commands() if language == "cmd" else _Bash(text).commands()


@dataclass
class _Raw:
    """A word as written: value or None; the variable it consists of, if it is nothing else; where it stands."""

    value: str | None
    start: int
    end: int
    shape: str
    variable: str | None = None  # `$X` or `"${X[@]}"` and nothing else
    quoted: bool = False
    splits: bool = False  # an unquoted part is unknown, or falls into several words


def _plain(word: _Raw) -> Word:
    return Word(word.value, word.start, word.end, shape=word.shape)


@dataclass
class _Bash:
    """Reads a bash script once, from front to end, keeping the variables it knows."""

    text: str
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[_Raw]] = field(default_factory=dict)

    def commands(self) -> list[Command]:
        self.at, self.pending = 0, []
        out: list[Command] = []
        raw: list[_Raw] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\r":
                self.at += 1
            elif self._continues():
                self.at = self.text.index("\n", self.at) + 1
            elif c == "#":
                self._skip_line()
            elif c == "\n":
                self.at += 1
                self._finish(raw, out)
                raw = []
                self._skip_heredocs()
            elif c in ";&|()":
                self.at += 1
                if not self.text.startswith(">", self.at) or c != "&":
                    self._finish(raw, out)
                    raw = []
            elif c in "<>":
                self._redirection()
            else:
                word = self._word()
                if self._is_array(word):
                    self._array(word)
                elif not (self.text[self.at : self.at + 1] in ("<", ">") and (word.value or "").isdigit()):
                    raw.append(word)
        self._finish(raw, out)
        return out

    def _continues(self) -> bool:
        return bool(re.match(r"\\\r?\n", self.text[self.at : self.at + 3]))

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_heredocs(self) -> None:
        for delimiter in self.pending:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], end + 1
                if line.strip("\t\r") == delimiter:
                    break
        self.pending = []

    def _redirection(self) -> None:
        if self.text.startswith("<<<", self.at):
            self.at += 3
        elif self.text.startswith("<<", self.at):
            self.at += 3 if self.text.startswith("<<-", self.at) else 2
            self._spaces()
            self.pending.append(self._word().value or "")
            return
        elif self.text.startswith(("<(", ">("), self.at):
            self.at = self._balanced(self.at + 1, "(", ")")
            return
        else:
            while self.at < len(self.text) and self.text[self.at] in "<>&|":
                self.at += 1
        self._spaces()
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|":
            self._word()

    def _spaces(self) -> None:
        while self.at < len(self.text) and (self.text[self.at] in " \t" or self._continues()):
            self.at = self.text.index("\n", self.at) + 1 if self._continues() else self.at + 1

    def _balanced(self, at: int, opening: str, closing: str) -> int:
        """The place after the bracket that closes the one at `at`; quotes inside are respected."""
        depth = 0
        while at < len(self.text):
            c = self.text[at]
            if c == "\\":
                at += 1
            elif c == "'" and opening != "{":
                at = self.text.find("'", at + 1)
                if at < 0:
                    return len(self.text)
            elif c == opening:
                depth += 1
            elif c == closing:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        return len(self.text)

    def _word(self) -> _Raw:
        """The word that begins here; it ends at an unquoted blank or operator."""
        start, parts, quoted, variable, splits = self.at, [], False, None, False
        while self.at < len(self.text):
            c = self.text[self.at]
            if self._continues():
                after = self.text.index("\n", self.at) + 1
                if self.at > start and (after >= len(self.text) or self.text[after] in " \t\r\n;&|()<>\\"):
                    break
                self.at = after
                continue
            if c in " \t\r\n;&|()<>":
                break
            if c == "\\":
                parts.append(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif c == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                parts.append(self.text[self.at + 1 : end])
                self.at, quoted = end + 1, True
            elif c == '"':
                value, variable = self._double_quoted()
                quoted = True
                parts.append(value)
            elif c == "$" and self.text.startswith("$'", self.at):
                parts.append(self._ansi())
                quoted = True
            elif c in "$`":
                begin = self.at
                value, variable = self._expansion()
                if value is None and self.at == begin + 1:
                    parts.append(c)  # a lone dollar sign
                else:
                    splits = splits or value is None or bool(re.search(r"[\s*?\[]", value))
                    parts.append(UNKNOWN if value is None else value)
            else:
                parts.append(c)
                self.at += 1
        self.at = min(max(self.at, start + 1), len(self.text))
        single = variable if variable and re.fullmatch(r'"?\$\{?[\w@\[\]]+\}?"?', self.text[start : self.at]) else None
        shape = "".join(parts)
        return _Raw(None if UNKNOWN in shape else shape, start, self.at, shape, single, quoted, splits)

    def _double_quoted(self) -> tuple[str, str | None]:
        """The value of "…" (with a NUL for what is unknown) and the variable that it names last."""
        self.at += 1
        parts, variable = [], None
        while self.at < len(self.text) and self.text[self.at] != '"':
            c = self.text[self.at]
            if c == "\\" and self.at + 1 < len(self.text):
                follows = self.text[self.at + 1]
                parts.append("" if follows == "\n" else follows if follows in '$`"\\' else c + follows)
                self.at += 2
            elif c in "$`":
                begin = self.at
                value, variable = self._expansion()
                if value is None and self.at == begin + 1:
                    parts.append(c)
                else:
                    parts.append(UNKNOWN if value is None else value)
            else:
                parts.append(c)
                self.at += 1
        self.at += 1
        return "".join(parts), variable

    def _expansion(self) -> tuple[str | None, str | None]:
        """What `$…` or a backquoted command stands for, and the name of the variable, if it is one."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            self.at = len(text) if end < 0 else end + 1
            return None, None
        if text.startswith("$(", at):
            self.at = self._balanced(at + 1, "(", ")")
            return None, None
        if text.startswith("${", at):
            self.at = self._balanced(at + 1, "{", "}")
            inner = text[at + 2 : self.at - 1]
        elif name := NAME.match(text, at + 1):
            self.at = name.end()
            inner = name.group()
        else:
            special = at + 1 < len(text) and text[at + 1] in "@*#?$!-0123456789"
            self.at = at + 2 if special else at + 1
            return None, ("@" if special else None)
        array = inner.removesuffix("[@]").removesuffix("[*]")
        if array != inner:
            return None, array
        return (self.variables.get(inner) if NAME.fullmatch(inner) else None), inner

    def _ansi(self) -> str:
        """The value of $'…'."""
        self.at += 2
        parts = []
        while self.at < len(self.text) and self.text[self.at] != "'":
            c = self.text[self.at]
            code = re.match(
                r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|[uU]([0-9a-fA-F]{1,8}))", self.text[self.at : self.at + 12]
            )
            if code:
                octal, byte, point = code.groups()
                parts.append(chr(int(octal, 8) if octal else int(byte or point, 16)))
                self.at += code.end()
            elif c == "\\":
                follows = self.text[self.at + 1 : self.at + 2]
                parts.append(ANSI.get(follows, follows))
                self.at += 2
            else:
                parts.append(c)
                self.at += 1
        self.at += 1
        return "".join(parts)

    def _is_array(self, word: _Raw) -> bool:
        return self.text.startswith("(", self.at) and bool(re.fullmatch(r"\w+\+?=", self.text[word.start : word.end]))

    def _array(self, word: _Raw) -> None:
        """Read `NAME=( words )`."""
        name, adds = re.fullmatch(r"(\w+)(\+?)=", self.text[word.start : word.end]).groups()
        self.at += 1
        items = list(self.arrays.get(name, [])) if adds else []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._continues() or self.text[self.at] in " \t\r\n;&|(<>":
                self.at = self.text.index("\n", self.at) + 1 if self._continues() else self.at + 1
            elif self.text[self.at] == "#":
                self._skip_line()
            else:
                items.append(self._word())
        self.at += 1
        self.arrays[name] = items

    def _finish(self, raw: list[_Raw], out: list[Command]) -> None:
        """A command is complete: remember what it assigns, or expand its words."""
        while raw and raw[0].value in RESERVED and not raw[0].quoted:
            raw = raw[1:]
        setter = bool(raw) and raw[0].value in SETTERS
        rest = raw[1:] if setter else raw
        assigned = 0
        for word in rest:
            name = re.match(r"(\w+)=", self.text[word.start : word.end])
            if not name:
                break
            assigned += 1
            if setter or all(re.match(r"\w+=", self.text[w.start : w.end]) for w in rest):
                self.variables[name.group(1)] = None if word.value is None else word.value[name.end() :]
        words, opaque = [], False
        for place, word in enumerate(raw):
            more = [_plain(word)] if not setter and place < assigned else self._expand(word)
            opaque = opaque or more is None
            words += [Word(None, word.start, word.end)] if more is None else more
        if words and not setter and assigned < len(rest):
            out.append(Command(words, opaque))

    def _expand(self, word: _Raw) -> list[Word] | None:
        """The words that a word becomes; None when nobody can tell how many."""
        if word.variable is None:
            return None if word.splits else [_plain(word)]
        if word.variable in self.arrays and "[" in self.text[word.start : word.end]:
            return [Word(item.value, word.start, word.end, False, item.shape) for item in self.arrays[word.variable]]
        if word.quoted:
            several = "[@]" in self.text[word.start : word.end] or word.variable == "@"
            return None if several else [_plain(word)]
        if word.value is None or re.search(r"[*?\[]", word.value):
            return None
        return [Word(part, word.start, word.end, False, part) for part in word.value.split()]
