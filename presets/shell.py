"""Finds the commands in a script and the position of every word, so that a fix changes one word and keeps all other bytes.

Not a complete shell parser: it handles what training scripts use (for bash: quotes, line continuations, comments,
here-documents, redirections, plain variables and arrays; batch files and PowerShell have modules of their own). A word that
cannot be known without running the script (the output of a command, a variable of the environment, a variable that is set on
a condition) has the value None.
"""

import re
import shlex
from dataclasses import dataclass, field

from presets.batch import Batch
from presets.powershell import PowerShell
from presets.syntax import Command, Fields, Word

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
OPENING, BRANCH, CLOSING = {"if", "while", "until", "for", "case", "{"}, {"elif", "else"}, {"fi", "done", "esac", "}"}
SETTERS = {"export", "declare", "local", "readonly", "typeset"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


def dialect(name: str, text: str) -> str:
    """`cmd` for batch files, `ps` for PowerShell, else `sh`."""
    if name.lower().endswith(".ps1"):
        return "ps"
    batch = name.lower().endswith((".bat", ".cmd")) or re.match(r"\s*@?echo off", text, re.IGNORECASE)
    return "cmd" if batch else "sh"


def commands(text: str, language: str) -> list[Command]:
    """The commands of a script, in order."""
    return {"cmd": Batch, "ps": PowerShell, "sh": _Bash}[language](text).commands()


@dataclass
class _Raw:
    """A word as written: its value (or None), the variable that it consists of (if nothing else), and its position."""

    value: str | None
    start: int
    end: int
    shape: str
    variable: str | None = None  # `$X` or `"${X[@]}"` and nothing else
    quoted: bool = False
    splits: bool = False  # the number of words is unknown
    fields: tuple[str, ...] = ()  # the words, where unquoted variables make it several


def _plain(word: _Raw) -> Word:
    return Word(word.value, word.start, word.end, shape=word.shape)


def _continuation(text: str, at: int) -> int:
    """The length of a backslash with the end of its line (or of the file); 0 if there is none."""
    found = re.match(r"\\\r?(?:\n|\Z)", text[at : at + 3]) if text.startswith("\\", at) else None
    return len(found.group()) if found else 0


@dataclass
class _Bash:
    """Parses a bash script from start to end and tracks the variables whose values are known."""

    text: str
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[_Raw]] = field(default_factory=dict)

    def commands(self) -> list[Command]:
        """The commands. A first pass finds the variables that a function or loop sets: they have no known value elsewhere."""
        self.elsewhere: set[str] = set()
        self._read()
        return self._read()

    def _read(self) -> list[Command]:
        self.variables, self.arrays = {}, {}
        self.at = 1 if self.text.startswith("\ufeff") else 0
        self.blocks: list[tuple[str, set[str]]] = []  # the open blocks, and the variables that each sets
        self.conditional = False  # after && or ||
        self.unclosed = False  # a quote of this command has no end
        self.pending: list[tuple[str, str]] = []  # the here-documents: how each was opened, and its delimiter
        out: list[Command] = []
        raw: list[_Raw] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\r":
                self.at += 1
            elif self._continues():
                self.at += self._continues()
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
                    self._operator(c)
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

    def _continues(self) -> int:
        return _continuation(self.text, self.at)

    def _operator(self, c: str) -> None:
        """Track blocks and conditions: what is set inside may not be set after them."""
        if c in "&|" and self.text.startswith(c, self.at):
            self.at += 1
            self.conditional = True
        elif c == ";" and self.text.startswith(";", self.at):
            self._forget()
        elif c == "(":
            self.blocks.append(("(", set()))
        elif c == ")" and self.blocks and self.blocks[-1][0] == "(":
            self._forget()
            self.blocks.pop()

    def _reserved(self, word: str) -> None:
        if word in OPENING:
            self.blocks.append((word, set()))
        elif word in BRANCH | CLOSING and self.blocks:
            self._forget()
            if word in CLOSING:
                self.blocks.pop()

    def _forget(self) -> None:
        for name in self.blocks[-1][1] if self.blocks else ():
            self.variables[name] = None
            self.arrays.pop(name, None)

    def _assigned(self, name: str) -> None:
        for _, names in self.blocks:
            names.add(name)
        if self._repeats():
            self.elsewhere.add(name)
        elif name in self.elsewhere:
            self.variables[name] = None
            self.arrays.pop(name, None)

    def _repeats(self) -> bool:
        """Whether this is in a function or loop."""
        return any(opening in ("{", "for", "while", "until") for opening, _ in self.blocks)

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_heredocs(self) -> None:
        for opened, delimiter in self.pending:
            joined = False  # a backslash joins the next line to this one, unless the delimiter is quoted
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end].rstrip("\r"), end + 1
                if not joined and (line.lstrip("\t") if "-" in opened else line) == delimiter:
                    break
                joined = "'" not in opened and (len(line) - len(line.rstrip("\\"))) % 2 == 1
        self.pending = []

    def _redirection(self) -> None:
        if self.text.startswith("<<<", self.at):
            self.at += 3
        elif self.text.startswith("<<", self.at):
            opened = "<<-" if self.text.startswith("<<-", self.at) else "<<"
            self.at += len(opened)
            self._spaces()
            word = self._word()
            plain = self.text[word.start : word.end] == word.value
            self.pending.append((opened if plain else f"{opened}'", word.value or ""))
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
            self.at += self._continues() or 1

    def _balanced(self, at: int, opening: str, closing: str) -> int:
        """The position after the bracket that closes the one at `at`, ignoring brackets in quotes."""
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
        """The word at this position; it ends at an unquoted space or operator."""
        start, quoted, splits = self.at, False, False
        fields = Fields()
        variable: str | None = None
        value: str | None
        while self.at < len(self.text):
            c = self.text[self.at]
            if self._continues():
                after = self.at + self._continues()
                if self.at > start and (after >= len(self.text) or self.text[after] in " \t\r\n;&|()<>\\"):
                    break
                self.at = after
                continue
            if c in " \t\r\n;&|()<>":
                break
            if c == "\\":
                fields.add(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif c == "'":
                end = self.text.find("'", self.at + 1)
                self.unclosed = self.unclosed or end < 0
                end = len(self.text) if end < 0 else end
                fields.add(self.text[self.at + 1 : end])
                self.at, quoted = end + 1, True
            elif c == '"':
                value, variable = self._double_quoted()
                quoted = True
                fields.add(value)
            elif c == "$" and self.text.startswith("$'", self.at):
                fields.add(self._ansi())
                quoted = True
            elif c in "$`":
                begin = self.at
                value, variable = self._expansion()
                if value is None and self.at == begin + 1:
                    fields.add(c)  # a lone dollar sign
                elif value is None or re.search(r"[*?\[]", value):
                    splits = True
                    fields.add(UNKNOWN if value is None else value)
                else:
                    fields.split(value)
            else:
                fields.add(c)
                self.at += 1
        self.at = min(max(self.at, start + 1), len(self.text))
        single = variable if variable and re.fullmatch(r'"?\$\{?[\w@*\[\]]+\}?"?', self.text[start : self.at]) else None
        shape = " ".join(fields.words)
        return _Raw(
            None if UNKNOWN in shape else shape, start, self.at, shape, single, quoted, splits, tuple(fields.words)
        )

    def _double_quoted(self) -> tuple[str, str | None]:
        """The value of "…" (with a NUL for each unknown part) and the last variable in it."""
        self.at += 1
        parts: list[str] = []
        variable: str | None = None
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
        self.unclosed = self.unclosed or self.at >= len(self.text)
        self.at += 1
        return "".join(parts), variable

    def _expansion(self) -> tuple[str | None, str | None]:
        """The value of `$…` or of a command in backquotes, and the name of the variable if it is one."""
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
        self.unclosed = self.unclosed or self.at >= len(self.text)
        self.at += 1
        return "".join(parts)

    def _is_array(self, word: _Raw) -> bool:
        return self.text.startswith("(", self.at) and bool(re.fullmatch(r"\w+\+?=", self.text[word.start : word.end]))

    def _array(self, word: _Raw) -> None:
        """Read `NAME=( words )`."""
        target = self.text[word.start : word.end].removesuffix("=")
        name = target.removesuffix("+")
        self.at += 1
        items = list(self.arrays.get(name, [])) if target != name else []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._continues() or self.text[self.at] in " \t\r\n;&|(<>":
                self.at += self._continues() or 1
            elif self.text[self.at] == "#":
                self._skip_line()
            else:
                items.append(self._word())
        self.at += 1
        self.arrays[name] = items
        self._assigned(name)

    def _finish(self, raw: list[_Raw], out: list[Command]) -> None:
        """Finish a command: store what it assigns, or expand its words."""
        opens_loop = False
        while raw and raw[0].value in RESERVED and not raw[0].quoted:
            self._reserved(raw[0].value)
            opens_loop = raw[0].value == "for"
            raw = raw[1:]
        if not raw:
            return
        conditional, self.conditional = self.conditional, False
        setter = raw[0].value in SETTERS
        self._forget_what_runs(
            [raw[0].value, *(word.value for word in raw[1:])] if not opens_loop else ["read", raw[0].value]
        )
        rest = [w for w in raw[1:] if not (w.value or "").startswith("-")] if setter else raw
        assigned = 0
        for word in rest:
            name = re.match(r"(\w+)(\+?)=", self.text[word.start : word.end])
            if not name:
                break
            assigned += 1
            if setter or all(re.match(r"\w+\+?=", self.text[w.start : w.end]) for w in rest):
                self._assign(name, word, conditional)
        words, opaque = [], False
        for place, word in enumerate(raw):
            more = [_plain(word)] if not setter and place < assigned else self._expand(word)
            opaque = opaque or more is None
            words += [Word(None, word.start, word.end, shape=word.shape)] if more is None else more
        if words and not setter and not opens_loop and assigned < len(rest):
            out.append(Command(words, opaque, self.unclosed))
        self.unclosed = False

    def _assign(self, name: re.Match[str], word: _Raw, conditional: bool) -> None:
        """Store `NAME=value`; unknown where a tilde, a condition or an unknown earlier value is involved."""
        value = None if word.value is None else word.value[name.end() :]
        if value is not None and self.text.startswith("~", word.start + name.end()):
            value = None
        if name.group(2) and value is not None:
            before = self.variables.get(name.group(1))
            value = None if before is None else before + value
        self.variables[name.group(1)] = None if conditional else value
        self.arrays.pop(name.group(1), None)
        self._assigned(name.group(1))

    def _forget_what_runs(self, words: list[str | None]) -> None:
        """Forget the variables that a command can set: those it names, or all where it runs another script in this shell."""
        if words[0] in ("read", "mapfile", "readarray", "unset", "getopts", "printf", "let"):
            for name in words[1:]:
                self.variables[name or ""] = None
                self.arrays.pop(name or "", None)
                self._assigned(name or "")
        elif words[0] in ("source", ".", "eval") and not (words[1:] and (words[1] or "").endswith("/activate")):
            self.variables = dict.fromkeys(self.variables)
            self.arrays = {}

    def _expand(self, word: _Raw) -> list[Word] | None:
        """The words that a word expands to; None when their number is unknown."""
        if word.variable is None or (word.variable not in self.arrays and word.fields and not word.quoted):
            return None if word.splits else self._fields(word, word)
        written = self.text[word.start : word.end]
        if word.variable in self.arrays and "[" in written:
            return self._items(word, written)
        if word.quoted:
            several = "[@]" in written or word.variable == "@"
            return None if several else [_plain(word)]
        return None if word.splits else self._fields(word, word)

    def _items(self, word: _Raw, written: str) -> list[Word] | None:
        """The words of an array. Where the script uses it once, each word is edited in the array itself."""
        items = self.arrays[word.variable or ""]
        if not word.quoted:  # bash splits each item again
            values = [item.value for item in items]
            if any(item.splits for item in items) or not all(
                v is not None and not re.search(r"[*?\[~{]", v) for v in values
            ):
                return None
            parts = [part for value in values for part in (value or "").split()]
            return [Word(part, word.start, word.end, False, part, raw=shlex.quote(part)) for part in parts]
        if "[*]" in written and len(items) != 1:
            return None
        if any(item.splits or (item.variable and "[" in self.text[item.start : item.end]) for item in items):
            return None
        once = self.text.count(f"${{{word.variable}[") == 1 and all(len(item.fields) == 1 for item in items)
        out: list[Word] = []
        for item in items:
            out += self._fields(word, item, once)
        return out

    def _fields(self, word: _Raw, item: _Raw, once: bool = False) -> list[Word]:
        """The words that `item` becomes where `word` is written."""
        if item is word and len(item.fields) == 1:
            return [_plain(word)]
        written = self.text[item.start : item.end]
        if len(item.fields) == 1 and (once or not re.search(r"[$`]", written)):
            place = (item.start, item.end) if once else None
            return [Word(item.value, word.start, word.end, once, item.shape, place, written)]
        return [
            Word(
                None if UNKNOWN in f else f,
                word.start,
                word.end,
                False,
                f,
                None,
                None if UNKNOWN in f else shlex.quote(f),
            )
            for f in item.fields
        ]
