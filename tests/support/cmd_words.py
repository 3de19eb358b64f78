"""What a Windows program sees of a line of a batch file, read independently of the project's own parser."""


def cmd_words(line: str) -> list[str]:
    """What a Windows program sees of a batch line: cmd.exe's carets, percents and quotes, then the C runtime's argv."""
    out, quoted, i = [], False, 0
    while i < len(line):
        c = line[i]
        if c == "%":
            assert line[i : i + 2] == "%%", f"a single percent sign would be expanded: {line!r}"
            out.append("%")
            i += 2
            continue
        if c == "^" and not quoted:
            out.append(line[i + 1])
            i += 2
            continue
        if c == '"':
            quoted = not quoted
        elif not quoted:
            assert c not in "&|<>()", f"cmd would act on {c!r} in {line!r}"
        out.append(c)
        i += 1
    return runtime_words("".join(out))


def runtime_words(line: str) -> list[str]:
    """argv by the Microsoft C runtime's rules: backslashes count only before a quote."""
    words, word, quoted, started, i = [], [], False, False, 0
    while i < len(line):
        run = len(line) - i - len(line[i:].lstrip("\\"))
        if run and i + run < len(line) and line[i + run] == '"':
            word.append("\\" * (run // 2))
            started, i = True, i + run
            if run % 2:
                word.append('"')
                i += 1
            continue
        if run:
            word.append("\\" * run)
            started, i = True, i + run
        elif line[i] == '"':
            if quoted and line[i + 1 : i + 2] == '"':
                word.append('"')
                i += 1
            else:
                quoted = not quoted
            started, i = True, i + 1
        elif line[i] in " \t" and not quoted:
            if started:
                words.append("".join(word))
            word, started, i = [], False, i + 1
        else:
            word.append(line[i])
            started, i = True, i + 1
    return [*words, "".join(word)] if started else words
