"""Reads the command lines of batch files and PowerShell scripts: words, line continuations, and variables that are set once.

What is certain gets a value: a word with a variable that a person types, that a block or a condition sets, or that the
system has, is None; where it may be any number of words, the command is opaque. In cmd a variable is replaced before
the line is read, so a value with spaces outside quotes becomes several words. In PowerShell a comma outside quotes
makes several arguments.
"""

import re
from dataclasses import dataclass

from presets.syntax import UNKNOWN, Command, Fields, Word


@dataclass(frozen=True)
class Language:
    """How a language writes what stands between words. A variable that `elsewhere` names has no known value."""

    skip: re.Pattern[str]
    remark: re.Pattern[str]
    assignment: re.Pattern[str]
    elsewhere: re.Pattern[str]
    redirection: re.Pattern[str]
    ends: str


CMD = Language(
    skip=re.compile(r"[ \t\r]+|\^\r?(?:\n|\Z)"),
    remark=re.compile(r"[ \t@(]*(?:rem(?=[ \t\r\n^]|$)|:)[^\n]*", re.IGNORECASE),
    assignment=re.compile(
        r'[ \t@]*set[ \t]+(?!/)(?:"(?P<name>[^"=\n]+)=(?P<value>[^"\n]*)"|(?P<plain>[^"=\n]+)=(?P<rest>[^\n&|]*))', re.IGNORECASE
    ),
    elsewhere=re.compile(r'[^\s(@][^\n]*?\bset[ \t]+"?(\w+)=|\bset[ \t]+/[ap][ \t]+"?(\w+)', re.IGNORECASE),
    redirection=re.compile(r"[0-9]?(?:>>?|<)(?P<number>&[0-9])?[ \t]*"),
    ends="\n&|",
)  # fmt: skip
POWERSHELL = Language(
    skip=re.compile(r"[ \t\r]+|`\r?(?:\n|\Z)|#[^\n]*|<#.*?(?:#>|\Z)", re.DOTALL),
    remark=re.compile(r"(?!)"),
    assignment=re.compile(
        r"\$(?P<name>\w+)[ \t]*=[ \t]*(?P<value>\"[^\"`$\n]*\"|'[^'\n]*'|\d+)[ \t\r]*(?:#[^\n]*)?(?=[\n;]|\Z)"
    ),
    elsewhere=re.compile(r"\$(?:\w+:)?(\w+)[ \t]*[+*/-]?=(?!=)|\$(\w+)[ \t]+in\b", re.IGNORECASE),
    redirection=re.compile(r"[0-9*]?(?:>>?(?P<number>&[0-9])?|<)[ \t]*"),
    ends="\n;|&(){}",
)
CMD_VARIABLE = re.compile(r"%(?:(\w+)|[\w()]+:[^%\r\n]*|(?:~[\w$:]*)?([0-9*]))%?|!\w+!")
PS_PIECE = re.compile(
    r"""'(?P<single>(?:[^']|'')*)'|"(?P<double>(?:[^"`]|""|`.)*)"|`(?P<escaped>.)|\$\{?(?P<name>\w+)\}?(?![\w:.\[])
    |(?P<odd>[$@]\((?:[^()]|\([^()]*\))*\)?|[$@,]|['"].*)|(?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
PS_VARIABLE = re.compile(
    r"`(.)|\"\"|\$(?:\{(\w+)\}|(\w+)(?![\w:.\[]))|\$\((?:[^()]|\([^()]*\))*\)?|\$[\w:?^{]+", re.DOTALL
)
PS_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


class Reader:
    """Reads a script from start to end."""

    def __init__(self, text: str, language: str):
        self.text, self.cmd = text, language == "cmd"
        self.language = CMD if self.cmd else POWERSHELL
        self.variables: dict[str, str] = {}
        names = [name.lower() for pair in self.language.elsewhere.findall(text) for name in pair if name]
        # PowerShell's pattern finds the plain assignment, too
        self.unsure = {name for name in names if self.cmd or names.count(name) > 1}
        self.loops = {f"%%{letter}" for letter in re.findall(r"\bfor\b[^\n]*?%%(\w)", text, re.IGNORECASE)}
        self.at = 1 if text.startswith("\ufeff") else 0
        self.depth = 0
        self.out: list[Command] = []
        self.command = Command([])

    def commands(self) -> list[Command]:
        language, start = self.language, True
        while self.at < len(self.text):
            c = self.text[self.at]
            skipped = (start and language.remark.match(self.text, self.at)) or language.skip.match(self.text, self.at)
            if start and not skipped and (found := language.assignment.match(self.text, self.at)):
                self._assign(found)
                self.at = found.end()
            elif skipped:
                self.at = skipped.end()
            elif c in language.ends or (self.cmd and self._groups(c)):
                self.depth += {"(": 1, ")": -1, "{": 1, "}": -1}.get(c, 0)
                self.at += 1
                self._finish()
                start = c in "\n;"
                continue
            elif found := language.redirection.match(self.text, self.at):
                self.at = found.end()
                if not found["number"]:
                    self._word(Fields())
            elif self.cmd and c == "@" and not self.command.words:
                self.at += 1
            else:
                self._argument()
            start = start and bool(skipped)
        self._finish()
        return self.out

    def _groups(self, c: str) -> bool:
        """Whether a bracket of cmd groups commands: at the start of a command or after `if`, `for` and `else`."""
        words = self.command.words
        opens = not words or (words[0].value or "").lower() in ("if", "for", "else")
        return (c == "(" and opens) or (c == ")" and self.depth > 0)

    def _finish(self) -> None:
        if self.command.words:
            self.out.append(self.command)
        self.command = Command([])

    def _assign(self, found: re.Match[str]) -> None:
        name = (found["name"] or found["plain"]).strip().lower() if self.cmd else found["name"].lower()
        if self.cmd:
            written = found["value"] if found["name"] else found["rest"].rstrip("\r")
            value = self._percents(written)
        else:
            value = found["value"].strip("'\"")
        if self.depth or name in self.unsure or UNKNOWN in value:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def _argument(self) -> None:
        start, fields = self.at, Fields()
        counted = self._word(fields)
        self.at = min(max(self.at, start + 1), len(self.text))
        self.command.opaque = self.command.opaque or not counted
        for value in fields.words or [""]:
            known = UNKNOWN not in value and (counted or self.cmd)
            alone = len(fields.words) < 2
            raw = quote(value) if known and self.cmd else None
            self.command.words.append(Word(value if known else None, start, self.at, alone, value, raw=raw))

    def _word(self, fields: Fields) -> bool:
        """Read a word; False where it may be any number of words."""
        return self._cmd_word(fields) if self.cmd else self._ps_word(fields)

    # cmd --------------------------------------------------------------------------------------------------------------

    def _cmd_word(self, fields: Fields) -> bool:
        """A word as the program receives it: cmd reads carets and variables, the program quotes and backslashes."""
        quoted, inside, counted, backslashes = False, False, True, 0  # cmd's quotes, the program's quotes
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n" or (not quoted and CMD.skip.match(self.text, self.at) and c == "^"):
                break
            if (caret := c == "^" and not quoted) and self.at + 1 < len(self.text):
                self.at += 1
                c = self.text[self.at]
            if c == '"':
                fields.add("")
                if backslashes:
                    fields.words[-1] = fields.words[-1][: -((backslashes + 1) // 2)]
                if backslashes % 2:
                    fields.add('"')
                else:
                    inside = not inside
                quoted = quoted if caret else not quoted
            elif c == "%" and self.text.startswith("%%", self.at):
                loop = self.text[self.at : self.at + 3] in self.loops
                counted = counted and (inside or not loop)
                fields.add(UNKNOWN if loop else "%")
                self.at += 2 if loop else 1
            elif c in "%!" and not caret and (found := CMD_VARIABLE.match(self.text, self.at)):
                value = self.variables.get((found[1] or "").lower()) if found[0].endswith("%") else None
                if value is None or inside:
                    counted = counted and (inside and found[2] != "*") if value is None else counted
                    fields.add(UNKNOWN if value is None else value)
                else:
                    for number, part in enumerate(value.split('"')):
                        (fields.add if number % 2 else fields.split)(part)
                self.at = found.end() - 1
            elif not (inside or caret) and (c in " \t\r&|<>" or (c == ")" and self.depth)):
                break
            elif c != "\r" or self.text[self.at + 1 : self.at + 2] != "\n":
                fields.add(c)
            backslashes = backslashes + 1 if c == "\\" else 0
            self.at += 1
        self.command.unclosed = self.command.unclosed or inside
        return counted

    def _percents(self, text: str) -> str:
        """A text with its variables replaced by their values, or by NUL where they are unknown."""
        parts = (
            CMD_VARIABLE.sub(lambda found: self.variables.get((found[1] or "").lower(), UNKNOWN), part)
            for part in text.split("%%")
        )
        return "%".join(parts)

    # PowerShell -------------------------------------------------------------------------------------------------------

    def _ps_word(self, fields: Fields) -> bool:
        """A word; a variable, list or expression that is not known may be several, and so may all behind an open quote."""
        start, counted = self.at, True
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;|&(){}":
            if POWERSHELL.skip.match(self.text, self.at) and self.text[self.at] == "`":
                break
            found = PS_PIECE.match(self.text, self.at)
            assert found is not None, "any character matches"
            kind = found.lastgroup or ""
            value: str | None = found[kind]
            if kind == "name":
                value = self.variables.get(found["name"].lower())
            elif kind == "odd":
                value = None
            elif kind == "double":
                value = self._filled(found["double"])
            elif kind == "single":
                value = found["single"].replace("''", "'")
            elif kind == "escaped":
                value = PS_ESCAPES.get(found["escaped"], found["escaped"])
            counted = counted and (value is not None or (self.at > start and found[0] != ","))
            fields.add(UNKNOWN if value is None else value)
            self.at = found.end()
        return counted

    def _filled(self, text: str) -> str:
        """A text between double quotes with its variables and escapes replaced."""

        def value(found: re.Match[str]) -> str:
            if found[1]:
                return PS_ESCAPES.get(found[1], found[1])
            if found[0] == '""':
                return '"'
            return self.variables.get((found[2] or found[3] or "").lower(), UNKNOWN)

        return PS_VARIABLE.sub(value, text)


def quote(value: str) -> str:
    """A value as cmd and the program that it starts read it: in plain quotes, which a person can read, where it has none."""
    if re.fullmatch(r"[\w./:\\=+,-]+", value):
        return value
    if '"' in value:
        return escaped(value)
    return '"' + re.sub(r"(\\+)$", r"\1\1", value.replace("%", "%%")) + '"'


def escaped(value: str) -> str:
    """A value in the quotes that the program's own parser needs, with a caret before every character that cmd interprets.

    Also before quotes, so that cmd never enters its quoted state and no `&` can end the command.
    """
    if re.fullmatch(r"[\w+./:\\@#=,-]+", value, re.ASCII):
        return value
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    inner = re.sub(r"(\\+)$", r"\1\1", inner)
    return "".join("%%" if c == "%" else f"^{c}" if c in '^&|<>()"!' else c for c in f'"{inner}"')
