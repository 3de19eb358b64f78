"""Quoting of every value that is written into a script: one function for bash, one for cmd.exe.

bash: a word of safe characters stays as it is; anything else is put between single quotes, which bash takes literally.
Control characters become escapes in `$'…'`, so that each flag stays on one line. cmd.exe: the quotes that the program's
own parser needs, then a caret before every character that cmd interprets (also before quotes, so that cmd never enters
its quoted state and no `&` can end the command), and doubled percent signs. A `Variable` is read where the script runs.
"""

import re

from presets import windows
from runs.files import RunError

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
CONTROL = r"\x01-\x1f\x7f"
ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "'": r"\'", "\\": r"\\"}


class Variable(str):
    """The name of an environment variable whose value, not its name, is the word of the command line."""


def quote(value: str) -> str:
    """`value` quoted for bash; a Variable as `"$NAME"`.

    Raises:
        RunError: `value` contains a NUL character, which no argument can; or a Variable is not a name.
    """
    if isinstance(value, Variable):
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise RunError(f"{str(value)!r} is not the name of an environment variable")
        return f'"${value}"'
    if "\0" in value:
        raise RunError(f"the value {value!r} contains a NUL character; remove it")
    if PLAIN.fullmatch(value):
        return value
    if not re.search(f"[{CONTROL}]", value):
        return "'" + value.replace("'", "'\\''") + "'"
    escaped = re.sub(rf"[{CONTROL}'\\]", lambda found: ESCAPES.get(found[0]) or f"\\{ord(found[0]):03o}", value)
    return f"$'{escaped}'"


def quote_cmd(value: str) -> str:
    """`value` quoted for a batch file.

    Raises:
        RunError: `value` contains a line break or NUL, which a batch file cannot hold.
    """
    if any(c in value for c in "\0\r\n\x1a"):
        raise RunError(
            f"the value {value!r} contains a line break or control character, which a batch file cannot hold; remove it"
        )
    return windows.quote(value)
