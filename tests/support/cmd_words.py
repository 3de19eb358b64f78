"""What a Windows program sees of a line of a batch file, read independently of the project's own parser."""

import re


def cmd_words(line: str) -> list[str]:
    """What a Windows program sees of a batch line: cmd.exe's carets, percents and quotes, then the C runtime's argv."""
    out, quoted, characters = "", False, iter(line)
    for c in characters:
        if c == "%":
            assert next(characters, "") == "%", f"a single percent sign would be expanded: {line!r}"
        elif c == "^" and not quoted:
            c = next(characters)
        elif c == '"':
            quoted = not quoted
        elif not quoted:
            assert c not in "&|<>()", f"cmd would act on {c!r} in {line!r}"
        out += c
    return runtime_words(out)


def runtime_words(line: str) -> list[str]:
    """argv by the Microsoft C runtime's rules: backslashes count before a quote only, two quotes in quotes are one."""
    words, word, quoted, closed_at = [], None, False, -1
    for token in re.finditer(r'(\\*)"|(.)', f"{line} ", re.DOTALL):
        slashes, other = token.groups()
        if other and other in " \t" and not quoted:
            words += [] if word is None else [word]
            word = None
        elif other:
            word = (word or "") + other
        else:
            literal = len(slashes) % 2 or (not quoted and closed_at == token.end() - 1)
            word = (word or "") + "\\" * (len(slashes) // 2) + '"' * literal
            if not len(slashes) % 2:
                quoted, closed_at = not quoted, token.end() if quoted else -1
    assert not quoted, f"an open quote in {line!r}"
    return words
