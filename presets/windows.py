"""Reads the command lines of batch files and PowerShell scripts: words, continuations, and variables that are set once.

What is certain gets a value. A word is None with a variable that a person types, that a block or a condition sets, that
is set twice or that the system has; where it may be any number of words, the command is opaque. A batch file is read as
Windows does it, in two passes: cmd replaces variables and carets, then the program's own runtime splits the line.
"""

import re
from collections import Counter

from presets.syntax import UNKNOWN, Command, Filled, Word

CMD = re.compile(
    r"""(?P<next>\^\r?(?:\n|\Z)) | \^(?P<caret>.) | %%(?P<loop>\w?) | %(?P<name>\w+)%
    | (?P<odd>%[\w()]+:[^%\r\n]*%? | %~?[\w$:]*[0-9*] | %\w*\*? | !\w+!)
    | (?P<into>[0-9]?(?:>>?|<)(?P<number>&[0-9])?[ \t]*) | (?P<end>[\n&|]) | (?P<bracket>[()]) | (?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
CMD_REMARK = re.compile(r"[ \t@(]*(?:rem(?=[ \t\r\n^]|$)|:)[^\n]*", re.IGNORECASE)
CMD_SET = re.compile(r'[ \t@]*set[ \t]+(?!/)(")?(\w+)=((?(1)[^"\n]*|[^\n&|]*))(?(1)")', re.IGNORECASE)
CMD_SETS = re.compile(r'\bset[ \t]+(?:/[ap][ \t]+)?"?(\w+)=', re.IGNORECASE)
CMD_LOOPS = re.compile(r"\bfor\b[^\n]{0,200}?%%(\w)", re.IGNORECASE)
INTO = "\1"  # the next word is the target of a redirection
Char = tuple[str, int, int]  # what the program gets, and the text from which it comes

POWERSHELL = re.compile(
    r"""(?P<skip>[ \t\r]+|`\r?(?:\n|\Z)|\#[^\n]*|<\#.*?(?:\#>|\Z)) | (?P<into>[0-9*]?(?:>>?(?P<number>&[0-9])?|<)[ \t]*)
    | (?P<end>[\n;|&(){}]) | '(?P<single>(?:[^']|'')*)' | "(?P<double>(?:[^"`]|""|`.)*)" | `(?P<escaped>.)
    | \$\{?(?P<name>\w+)\}?(?![\w:.\[]) | (?P<odd>[$@]\((?:[^()]|\([^()]*\))*\)?|[$@,]|['"].*) | (?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
PS_SET = re.compile(r"\$(\w+)[ \t]*=[ \t]*(\"[^\"`$\n]*\"|'[^'\n]*'|\d+)[ \t\r]*(?:#[^\n]*)?(?=[\n;]|\Z)")
PS_SETS = re.compile(r"\$(?:\w+:)?(\w+)(?:[ \t]*[+*/-]?=(?!=)|[ \t]+in\b)", re.IGNORECASE)
PS_FILLED = re.compile(r"`(.)|(\"\")|\$\{?(\w+)\}?(?![\w:.\[])|\$\((?:[^()]|\([^()]*\))*\)?|\$[\w:?^{]+", re.DOTALL)
PS_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


def _once(pattern: re.Pattern[str], text: str) -> set[str]:
    """The variables that a script sets in one place."""
    found = Counter(name.lower() for name in pattern.findall(text))
    return {name for name, count in found.items() if count == 1}


def batch(text: str) -> list[Command]:
    """The commands of a batch file, in order."""
    once, loops, variables = _once(CMD_SETS, text), set(CMD_LOOPS.findall(text)), dict[str, str]()
    out, line, depth, quoted, filled = list[Command](), list[Char](), 0, False, Filled()
    # looked: from the space before, which is passed over; head: the first five characters of the line's words
    at, start, looked, head = int(text.startswith("\ufeff")), True, False, ""

    def known(name: str | None) -> str:
        return filled(variables.get((name or "").lower(), UNKNOWN))

    while at < len(text):
        if start and not looked and (found := CMD_REMARK.match(text, at) or CMD_SET.match(text, at)):
            if found.re is CMD_SET and found[2].lower() in once and not depth:
                value = re.sub(r"%%|%(\w+)%", lambda one: known(one[1]) if one[1] else "%", found[3].rstrip("\r"))
                variables |= {found[2].lower(): value} if UNKNOWN not in value else {}
            at, start = found.end(), False
            continue
        piece = CMD.match(text, at)
        assert piece is not None, "any character matches"
        looked = piece[0] in (" ", "\t")
        kind, end, value = piece.lastgroup or "", piece.end(), text[at]
        if quoted and (kind in ("next", "caret", "into", "bracket") or piece[0] in "&|"):
            kind, end = "plain", at + 1
        opens = not head or head.split()[0].lower() in ("if", "for", "else")
        if kind == "end" or (kind == "bracket" and (depth > 0 if value == ")" else opens)):
            depth += {"(": 1, ")": -1}.get(value, 0)
            out += _runtime_words(line)
            line, head, quoted, start, at = [], "", False, value == "\n", end
            continue
        if kind == "caret":
            value = piece["caret"]
        elif kind in ("next", "into"):
            value = " " if kind == "next" or piece["number"] else INTO
        elif kind == "loop":
            value, end = (UNKNOWN, end) if piece["loop"] in loops else ("%", at + 2)
        elif kind in ("name", "odd") and piece[0] != "%":
            value = known(piece["name"])
        quoted = quoted != (kind != "caret" and value.count('"') % 2 == 1)
        if not (value == "@" and not head):
            line += [(char, at, end) for char in value]
            head = f"{head}{value}".lstrip()[:5]
        start = start and value.isspace()
        at = end
    return out + _runtime_words(line)


def _runtime_words(line: list[Char]) -> list[Command]:
    """The command of a line that cmd has read, by the rules of the Microsoft C runtime; none for an empty line."""
    words: list[tuple[str, int, int]] = []
    opaque, inside, target, begin = False, False, False, 0
    word: str | None = None
    text = "".join(char for char, *_ in line) + " "
    for piece in re.finditer(r'(\\*)"|\\+|(?s:.)', text):
        if piece[0] == INTO or (piece[0] in " \t\r" and (not inside or piece.end() == len(text))):
            if word is not None and not target:
                words.append((word, begin, line[piece.start() - 1][2]))
            target, word = piece[0] == INTO or (target and word is None), None
            continue
        if word is None:
            word, begin = "", line[piece.start()][1]
        if piece[1] is None:
            word += piece[0]
            opaque = opaque or (piece[0] == UNKNOWN and not inside)
        else:  # a quote after an odd number of backslashes is one of the word
            word += "\\" * (len(piece[1]) // 2) + '"' * (len(piece[1]) % 2)
            inside = inside != (len(piece[1]) % 2 == 0)
    found = []
    for number, (value, begin, end) in enumerate(words):  # words from one variable share a part of the text
        near = words[max(0, number - 1) : number + 2]
        found.append(Word(value, begin, end, alone=sum(a < end and begin < b for _, a, b in near) == 1))
    return [Command(found, opaque, inside)] if found else []


def powershell(text: str) -> list[Command]:
    """The commands of a PowerShell script, in order. A comma outside quotes makes several arguments."""
    once, variables = _once(PS_SETS, text), dict[str, str]()
    out, command = list[Command](), Command([])
    at, start, begin, target = int(text.startswith("\ufeff")), True, 0, False
    word: str | None = None
    filled = Filled()

    def known(name: str | None) -> str:
        return filled(variables.get((name or "").lower(), UNKNOWN))

    def in_quotes(found: re.Match[str]) -> str:
        if found[1] or found[2]:
            return PS_ESCAPES.get(found[1], found[1]) if found[1] else '"'
        return known(found[3])

    while at <= len(text):
        if start and (found := PS_SET.match(text, at)):
            if found[1].lower() in once:
                variables[found[1].lower()] = found[2].strip("'\"")
            at = found.end()
            continue
        piece = POWERSHELL.match(text, at)
        kind = piece.lastgroup or "" if piece else "end"
        if kind in ("skip", "end", "into") and word is not None:
            command.words += [] if target else [Word(word, begin, at)]
            word, target = None, False
        if piece is None or kind == "end":
            out += [command] if command.words else []
            command, start = Command([]), piece is None or text[at] in "\n;"
        elif kind == "into":
            target = not piece["number"]
        elif kind != "skip":
            value = piece[kind]
            if kind == "name":
                value = known(value)
            elif kind in ("double", "single"):
                value = PS_FILLED.sub(in_quotes, value) if kind == "double" else value.replace("''", "'")
            elif kind in ("odd", "escaped"):
                value = UNKNOWN if kind == "odd" else PS_ESCAPES.get(value, value)
            many = kind in ("name", "odd") and value == UNKNOWN and (word is None or piece[0] == ",")
            command.opaque = command.opaque or many
            begin = at if word is None else begin
            word, start = (word or "") + value, False
        at = piece.end() if piece else at + 1
    return out


def quote(value: str) -> str:
    """A value in the quotes that the program's parser needs, with a caret before every character that cmd interprets.

    Also before quotes, so that cmd never enters its quoted state and no `&` can end the command.
    """
    if re.fullmatch(r"[\w+./:\\@#=,-]+", value, re.ASCII):
        return value
    inner = re.sub(r'(?<!\\)(\\*)"', r'\1\1\\"', value)
    inner = re.sub(r"(?<!\\)(\\+)$", r"\1\1", inner)
    return "".join("%%" if c == "%" else f"^{c}" if c in '^&|<>()"!' else c for c in f'"{inner}"')
