"""One quoting function a shell: what every value that reaches a script goes through.

bash: a word of harmless characters stands as it is, everything else between single quotes, where bash changes nothing;
control characters are written as escapes in `$'…'`, so that one flag stays one line. cmd.exe: the quotes that the
program's own parser needs, then a caret before every character that cmd would act on (the quotes too, so that cmd never
enters its own quoted state and no `&` can end the command), and doubled percent signs, as batch files want them.
"""

import re
import string

from runs.files import RunError

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "'": r"\'", "\\": r"\\"}
CMD_ACTIVE = set('^&|<>()"!')
CMD_PLAIN = set(string.ascii_letters + string.digits + "_+-./:\\@#=,")


def quote(value: str) -> str:
    """A word that bash reads as exactly `value`.

    Raises:
        RunError: `value` holds a NUL character, which no argument of a program can.
    """
    if "\0" in value:
        raise RunError(f"a value holds a NUL character, which no command line can: {value!r}")
    if PLAIN.fullmatch(value):
        return value
    if not any(ord(c) < 32 or ord(c) == 127 for c in value):
        return "'" + value.replace("'", "'\\''") + "'"
    return (
        "$'"
        + "".join(ESCAPES.get(c) or (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c) for c in value)
        + "'"
    )


def quote_cmd(value: str) -> str:
    """A word of a batch file that reaches the program as exactly `value`.

    Raises:
        RunError: `value` holds a line break or NUL: a batch file has no way to write them.
    """
    if any(c in value for c in "\0\r\n\x1a"):
        raise RunError(f"a batch file cannot hold a line break or control character in a value: {value!r}")
    if value and all(c in CMD_PLAIN for c in value):
        return value
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    inner = re.sub(r"(\\+)$", r"\1\1", inner)
    word = f'"{inner}"'
    return "".join("%%" if c == "%" else f"^{c}" if c in CMD_ACTIVE else c for c in word)
