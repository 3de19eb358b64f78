"""Finds the commands in a bash script and where each word is, so that a fix changes one word and keeps all other bytes.

tree-sitter-bash parses the script; what its words are worth is decided here. A variable or array has a known value
where the script sets it at its top level and nowhere else. A word that cannot be known without running the script (the
output of a command, a variable of the environment, or one that is set on a condition, in a loop or in a function) has
the value None.
"""

import bisect
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from presets.syntax import UNKNOWN, Command, Filled, Word
from presets.tables import PresetError

if TYPE_CHECKING:
    from tree_sitter import Node

OPAQUE = ("command_substitution", "process_substitution", "arithmetic_expansion", "translated_string")
EXPANSIONS = ("simple_expansion", "expansion", *OPAQUE)
REDIRECTIONS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
AFTER_HEREDOC = ("pipeline", "command", "list", "redirected_statement", "file_redirect")
NO_WORDS = ("file_descriptor", "heredoc_body", "heredoc_end")
TOP_LEVEL = ("program", "declaration_command", "variable_assignments", "redirected_statement")
SETS_VARIABLES = re.compile(r"(?:read|mapfile|readarray|unset|getopts|printf|let)(?!\S)")
NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY = re.compile(r'("?)\$\{(\w+)\[([@*])\]\}"?')
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
PARSE_S = 10.0
PIECE = 1 << 16  # bytes that the parser gets at a time
UNQUOTED = re.compile(
    r"""'(?P<single>[^']*)'? | \$'(?P<ansi>(?:\\.|[^'\\])*)'? | \\(?:\r?\n(?P<gap>)|(?P<escaped>.)) | (?P<quote>")
    | (?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
IN_QUOTES = re.compile(
    r"""\\(?:\n(?P<gap>)|(?P<escaped>[$`"\\])) | (?P<quote>") | (?P<plain>.)""", re.DOTALL | re.VERBOSE
)
ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|[uU]([0-9a-fA-F]{1,8})|(.?))", re.DOTALL)

# What a written word becomes is a string with these marks, lone surrogates, which no decoded text has.
SPACE = "\ud800"  # here one word ends, because a variable has white space
WORD = "\ud801"  # there is a word here, be it an empty one
MANY = "\ud802"  # here may be any number of words


def _parse(text: bytes) -> "Node":
    """The root of the script's tree. PresetError after PARSE_S: some text that is no script takes the parser hours."""
    import tree_sitter
    import tree_sitter_bash

    end_s = time.monotonic() + PARSE_S
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    try:
        return parser.parse(
            lambda offset, _: text[offset : offset + PIECE], progress_callback=lambda *_: time.monotonic() > end_s
        ).root_node
    except ValueError as error:
        raise PresetError(f"the script cannot be read within {PARSE_S:g} s; check that it is a bash script") from error


@dataclass
class Bash:
    """Reads a bash script from start to end and tracks the variables whose values are known."""

    text: str
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)  # the items with their marks
    filled: Filled = field(default_factory=Filled)

    def commands(self) -> list[Command]:
        """All commands, in the order of the script. Raises: PresetError when it cannot be parsed in time."""
        # The parser counts bytes, so each character becomes one: a letter, or what a person on Windows meant to write.
        plain = re.sub(r"[^\x00-\x7f]", "x", re.sub(r"\A\ufeff", " ", self.text))
        plain = re.sub(r"\\[ \t\\]", "xx", plain).replace("\\\r\n", " \\\n").replace("\r", " ")
        plain = re.sub(r"\\\s*\Z", lambda found: " " * len(found[0]), plain)
        root = _parse(plain.encode("ascii", "replace"))
        self.unsure = set(_set_elsewhere(root, plain))
        self.out: list[Command] = []
        self._statement(root)
        for at in _errors(root):  # the line is not understood
            before = bisect.bisect_left(self.out, at, key=lambda command: command.start)
            command = self.out[before - 1] if before else None
            if command and self.text.find("\n", command.end, at) < 0:
                command.opaque = command.unclosed = True
        return self.out

    def _statement(self, node: "Node") -> None:
        """Read what a node runs and sets."""
        if node.type == "command":
            self._command(node)
        elif node.type in REDIRECTIONS:
            self._redirection(node)
        elif node.type == "variable_assignment" and self.text[node.start_byte] == "-":  # such as --flag=value
            self.out.append(Command([]))
            self._words(self.out[-1], [node])
        elif node.type == "variable_assignment":
            self._assign(node)
        elif node.type not in (*EXPANSIONS, "string", "concatenation", "test_command"):
            kept, function = (self.variables, self.arrays), node.type == "function_definition"
            if function:  # it is called later, when its variables may have other values
                self.variables, self.arrays = {}, {}
            for child in node.named_children:
                self._statement(child)
            if function:
                self.variables, self.arrays = kept

    def _redirection(self, node: "Node") -> None:
        """What follows a redirection's target: more arguments of the last command, or the rest of a pipeline."""
        rest = [child for child in node.named_children if child.type not in NO_WORDS][1:]
        if self.out:
            self._words(self.out[-1], [child for child in rest if child.type not in AFTER_HEREDOC])
        for child in rest:
            if child.type in AFTER_HEREDOC:
                self._statement(child)

    def _command(self, node: "Node") -> None:
        command = Command([])
        self.out.append(command)
        self._words(command, [child for child in node.named_children if child.type not in REDIRECTIONS])
        if not command.words:
            self.out.pop()
            return
        for child in node.named_children:
            if child.type in REDIRECTIONS:
                self._redirection(child)
        first, *rest = (word.value for word in command.words)
        if first in ("source", ".", "eval") and not (rest and (rest[0] or "").endswith("/activate")):
            self.variables, self.arrays = {}, {}

    def _words(self, command: Command, nodes: "list[Node]") -> None:
        groups: list[list[Node]] = []
        for node in nodes:
            gap = self.text[groups[-1][-1].end_byte : node.start_byte] if groups else " "
            if re.fullmatch(r"(\\\r?\n)*", gap):  # a continuation inside a word
                groups[-1].append(node)
            elif node.end_byte > node.start_byte:
                groups.append([node])
        for group in groups:
            start, end, marked = group[0].start_byte, group[-1].end_byte, self._marked(group)
            if self.text[start:end].isdigit() and self.text.startswith(("<", ">"), end):
                continue  # the number before a redirection, such as that of 2>&1
            array = ARRAY.fullmatch(self.text[start:end])
            values = self._expand(marked, array)
            command.opaque = command.opaque or values is None
            alone = values is None or (not array and len(values) == 1)
            known = [" ".join(_values(marked))] if values is None else values
            command.words += [Word(value, start, end, alone) for value in known]

    # Values -----------------------------------------------------------------------------------------------------------

    def _marked(self, nodes: "list[Node]", quoted: bool = False) -> str:
        """What nodes without space between them become, with its marks, by the rules of bash's quotes."""
        at, end = nodes[0].start_byte, nodes[-1].end_byte
        out, expansions = "", dict(_expansions(nodes))
        while at < end:
            if stop := expansions.get(at):
                out, at = out + self._expansion(self.text[at:stop], quoted), stop
                continue
            piece = (IN_QUOTES if quoted else UNQUOTED).match(self.text, at, end)
            assert piece is not None, "any character matches"
            kind, at = piece.lastgroup or "", piece.end()
            quoted = quoted != (kind == "quote")
            if kind != "gap":
                value = "" if kind == "quote" else piece[kind]
                out += WORD + (ESCAPE.sub(unescaped, value) if kind == "ansi" else value)
        return out

    def _expansion(self, written: str, quoted: bool) -> str:
        """The value of an expansion, with its marks."""
        name = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", written)
        value = self.variables.get(name[1]) if name and name[1] not in self.unsure else None
        self.filled(value or "")
        if not quoted and value is not None and not re.search(r"[*?\[]", value):
            return re.sub(r"\s+", SPACE, value)
        many = not quoted or re.fullmatch(r"\$(@|\{@\}|\{\w+\[@\]\})", written)
        return WORD + (UNKNOWN if value is None else value) + (MANY if many else "")

    def _expand(self, marked: str, array: re.Match[str] | None) -> list[str] | None:
        """The words that a written word becomes; None when their number is unknown."""
        if not array or array[2] not in self.arrays:
            return None if MANY in marked else _values(marked)
        items = self.arrays[array[2]]
        self.filled("".join(items))
        values = [value for item in items for value in _values(item)]
        if any(MANY in item for item in items) or (array[1] and array[3] == "*" and len(items) != 1):
            return None
        if array[1]:
            return values
        odd = any(re.search(rf"[*?\[~{{{UNKNOWN}]", value) for value in values)
        return None if odd else " ".join(values).split()  # bash splits each item again

    # Variables --------------------------------------------------------------------------------------------------------

    def _assign(self, node: "Node") -> None:
        """Store what `NAME=…` or `NAME+=…` sets."""
        if len(node.children) < 2:
            return
        left, value = node.children[0], node.children[-1]
        name, adds = self.text[left.start_byte : left.end_byte], node.children[1].type == "+="
        if name in self.unsure or left.type != "variable_name":
            return
        if value.type == "array":
            items = [self._marked([child]) for child in value.named_children if child.type != "comment"]
            self.arrays[name] = [*self.arrays.get(name, []), *items] if adds else items
            return
        self.arrays.pop(name, None)
        given = len(node.children) > 2
        new = " ".join(_values(self._marked([value], quoted=value.type in EXPANSIONS))) if given else ""
        known = UNKNOWN not in new and not self.text.startswith("~", value.start_byte)
        before = self.variables.get(name) if adds else ""
        self.variables[name] = before + new if known and before is not None else None


def _values(marked: str) -> list[str]:
    """The words of a string with marks."""
    return [word.replace(WORD, "").replace(MANY, "") for word in marked.split(SPACE) if word]


def unescaped(found: re.Match[str]) -> str:
    """The character of an escape in $'…'."""
    octal, byte, point, other = found.groups()
    if other is not None:
        return ANSI.get(other, other)
    code = int(octal, 8) if octal else int(byte or point, 16)
    return chr(code) if code < 0xD800 or 0xDFFF < code <= sys.maxunicode else "\ufffd"


def _expansions(nodes: "list[Node]") -> Iterator[tuple[int, int]]:
    """Where the expansions of a word begin and end."""
    for node in nodes:
        if node.type in EXPANSIONS:
            yield node.start_byte, node.end_byte
        else:
            yield from _expansions(node.named_children)


def _errors(node: "Node") -> Iterator[int]:
    """Where the script is not understood."""
    for child in node.children:
        if child.is_error or child.is_missing:
            yield child.start_byte
        elif child.has_error:
            yield from _errors(child)


def _set_elsewhere(node: "Node", text: str, top: bool = True) -> Iterator[str]:
    """The variables that something else than a plain assignment at the top level sets."""
    for child in node.named_children:
        written = text[child.start_byte : child.end_byte]
        if child.type == "variable_assignment" and node.type != "command" and not top:
            yield written.partition("=")[0].removesuffix("+")
        elif child.type in ("for_statement", "select_statement"):
            yield from re.findall(r"\A\w+\s+(\w+)", written)
        elif child.type in ("command", "unset_command") and SETS_VARIABLES.match(written):
            yield from NAME.findall(written)
        yield from _set_elsewhere(child, text, top and child.type in TOP_LEVEL)
