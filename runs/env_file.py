"""The secrets of a run: kept in a file of their own, and everywhere else only named.

Decision: one environment file a run, `.secrets/NAME.env` in the data folder, which only its owner can read. A run's
folder is downloaded, copied to a store, packed and published, so no file in it has a value: `run.toml` names the
variables, and the script reads the file where it runs. In memory a `RunSpec` holds the values in `environment`, so that
a copy of a run has them too; `RunSpec.public` and everything that writes a spec leaves them out. A variable or flag is
a secret by its name (API key, token, password…), or by a value such as an address with a password. Nothing of a script
is executed here.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.files import RunError, atomic_write, explained, private_folder
from runs.paths import data_root, outputs_dir
from runs.quoting import quote

if TYPE_CHECKING:
    from runs.spec import RunSpec

FOLDER = ".secrets"  # in the data folder; the page sends no file from there
FLAGS = {"wandb_api_key": "WANDB_API_KEY", "huggingface_token": "HF_TOKEN"}
"""Flags of the trainers that carry a secret → the variable that their libraries read instead (sd-scripts
library/args.py, musubi-tuner training/parser_common.py)."""
NAME = re.compile(
    r"(KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|AUTH|COOKIE|WEBHOOK|CONNECTION_STRING)(_|$)",
    re.I,
)
FLAG = re.compile(r"(api_?key|secret(_key)?|passw(or)?d|(^|_)token)$", re.I)  # not keep_tokens, not max_token_length
VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|[?&][\w-]*(?i:token|key|signature)=[^&\s]{8,}|\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|rpa_[A-Za-z0-9]{16,}|A[KS]IA[A-Z0-9]{12,})"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAY_HOLD = ("environment", "extra", "edited", "secrets")  # fields of a spec, secrets
WORTH = 8  # characters from which a value is looked for elsewhere in a script


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable is a secret, by its name or its value."""
    return bool(NAME.search(name) or VALUE.search(value))


def is_secret_flag(flag: str) -> bool:
    """Whether a flag of a trainer carries a secret."""
    return flag in FLAGS or bool(FLAG.search(flag))


# The file -------------------------------------------------------------------------------------------------------------


def path_of(folder: Path) -> Path:
    """The file of the run in `folder` (may not exist)."""
    folder = folder.absolute()
    name = folder.name
    if os.path.realpath(folder.parent) != os.path.realpath(outputs_dir()):  # a link to a folder is that folder
        name += f".{zlib.crc32(os.fsencode(folder)):08x}"
    return data_root().absolute() / FOLDER / f"{name}.env"


def read(folder: Path) -> dict[str, str]:
    """The values by variable; {} without a file, or one of another user. A line that a person broke is left out."""
    try:
        lines = path_of(folder).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, equals, value = line.removeprefix("export ").partition("=")
        if equals and VARIABLE.fullmatch(name):
            with contextlib.suppress(ValueError):  # an open quote
                found[name] = next(iter(shlex.split(value)), "") if line.startswith("export ") else value
    return found


def write(folder: Path, values: Mapping[str, str]) -> None:
    """Keep these values for the run in `folder`, and no others.

    Raises:
        RunError: the file cannot be written, or a value has a line break.
    """
    path = path_of(folder)
    if read(folder) == dict(values):
        return
    if not values:
        return forget(folder)
    if wrong := [name for name, value in values.items() if re.search(r"[\x00-\x1f\x7f]", value)]:
        raise RunError(f"{wrong[0]}: the value has a line break or control character, which no key has; correct it")
    line = "{}={}\n" if sys.platform == "win32" else "export {}={}\n"
    shown = (value if sys.platform == "win32" else quote(value) for value in values.values())
    with explained("keep the secrets of the run"):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            private_folder(path.parent)
        except PermissionError as error:
            raise RunError(f"cannot keep the secrets of the run: {error.strerror or error}") from error
        atomic_write(path, "".join(map(line.format, values, shown)), private=True)


def keep(folder: Path, spec: "RunSpec") -> None:
    """Keep the values that a spec has in memory; a value that it only names stays. RunError: as `write`."""
    known = {**read(folder), **spec.environment}
    write(folder, {name: known[name] for name in spec.secrets if name in known})


def filled(spec: "RunSpec", folder: Path) -> "RunSpec":
    """The spec with the values of the file of `folder`, where it has none."""
    known = read(folder) if spec.secrets else {}
    wanted = {*spec.secrets} - {*spec.environment}
    return with_values(spec, {name: value for name, value in known.items() if name in wanted})


def masking(folder: Path) -> Callable[[bytes], bytes]:
    """What shows the names instead of the values of the run's secrets in a text, such as a line of its log."""
    hidden = [(value.encode(), f"({name})".encode()) for name, value in read(folder).items() if len(value) >= WORTH]

    def masked(text: bytes) -> bytes:
        for value, name in hidden:
            text = text.replace(value, name)
        return text

    return masked


def masked_end(folder: Path, data: bytes, begun: bool) -> bytes:
    """The end of a log without the values of secrets. begun: it may begin within a secret, so what is before its first
    line end, or state of a progress bar, is left out."""
    first = re.search(rb"[\r\n]+(?=.)", data, re.DOTALL) if begun else None
    return masking(folder)(data[first.end() if first else 0 :])


def with_values(spec: "RunSpec", values: Mapping[str, str]) -> "RunSpec":
    """The spec with more secrets."""
    if not values:
        return spec
    return spec.changed(environment={**spec.environment, **values}, secrets=sorted({*spec.secrets, *values}))


def forget(folder: Path) -> None:
    """Remove the file of a run that is deleted, or that has no secret any more."""
    path_of(folder).unlink(missing_ok=True)


def kept_text(names: Iterable[str]) -> str:
    """The message about secrets that were moved."""
    kept = f"kept in a file that only you can read ({FOLDER} in the data folder)"
    return f"{', '.join(names)}: {kept}; the run, its script and what is shared have only the name"


# Fields and flags that hold secrets -----------------------------------------------------------------------------------


def moved(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a spec with each secret in `environment` and its name in `secrets`; `fields` itself without one."""
    tables = {key: fields[key] for key in ("environment", "extra", "edited") if isinstance(fields.get(key), Mapping)}
    environment, extra, edited = (dict(tables.get(key, {})) for key in ("environment", "extra", "edited"))
    given = fields.get("secrets") or []
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        return fields  # which is refused
    names = re.findall(VARIABLE, given) if isinstance(given, str) else list(given)
    for flag in [flag for flag in extra if isinstance(flag, str)]:
        variable = _variable(flag)
        if variable and isinstance(extra[flag], str | int) and extra[flag] is not True:
            value = str(extra.pop(flag) or "").strip()
            environment |= {variable: value} if value else {}
            names += [variable] if value else []
    for key in [key for key in edited if isinstance(edited[key], str)]:
        edited[key], found = of_script(edited[key])
        environment = {**found, **environment}
        names += found
    names += [name for name, value in environment.items() if isinstance(value, str) and is_secret(str(name), value)]
    if not names:
        return fields
    changed = {"environment": environment, "extra": extra, "edited": edited}
    kept = {key: value for key, value in changed.items() if value or key in tables}
    return {**fields, **kept, "secrets": sorted(set(names))}


def _variable(flag: str) -> str:
    """The variable that an option becomes: a flag that carries a secret, or the variable itself; "" for any other."""
    return FLAGS.get(flag) or (flag if flag.isupper() and is_secret(flag) else "")


def exposed(fields: Mapping[str, Any]) -> bool:
    """Whether a run.toml, as it was read, holds the value of a secret."""
    return bool(moved({**fields, "secrets": []}).get("secrets"))


def of_lines(text: str) -> tuple[str, dict[str, str]]:
    """(`KEY=VALUE` lines of “Extra trainer options” without secrets, which `secrets=…` names; the values)."""
    lines = [(line, *_option(line)) for line in text.splitlines()]
    values = {_variable(flag): value for _, flag, value in lines if value and _variable(flag)}
    if not values:
        return text, {}
    kept = [line for line, flag, _ in lines if flag != "secrets" and not ("=" in line and _variable(flag))]
    named = json.dumps(sorted({*named_in(text), *values}))
    return "".join(f"{line}\n" for line in (*kept, f"secrets={named}")), values


def named_in(text: str) -> list[str]:
    """The variables that `secrets=…` lines name."""
    options = map(_option, text.splitlines())
    return [name for flag, value in options if flag == "secrets" for name in re.findall(VARIABLE, value)]


def _option(line: str) -> tuple[str, str]:
    """(name, value) of a `KEY=VALUE` line."""
    key, _, value = line.partition("=")
    return key.strip().removeprefix("--").replace("-", "_"), value.strip()


# Scripts --------------------------------------------------------------------------------------------------------------

_QUOTED = r"""\$?'[^'\n]*'|"[^"\n]*\""""
_ASSIGNED = re.compile(rf"""(?<![\w$%-])(?P<name>[A-Za-z_]\w*)=(?P<value>(?:{_QUOTED}|[^\s;&|<>()"'`])+)""")
_BATCH_SET = re.compile(r"""(?im)^(?P<head>[ \t@]*set[ \t]+")(?P<name>[A-Za-z_]\w*)=(?P<value>[^"\r\n]*)(?=")""")
_FLAGGED = re.compile(
    rf"""(?<![\w-])--(?P<name>[A-Za-z_][\w-]*)(?:=|[ \t]+|[ \t]*[\\^]\r?\n[ \t]*)(?P<value>(?:{_QUOTED}|[^\s;&|<>()"'`\\^-])(?:{_QUOTED}|[^\s;&|<>()"'`])*)"""
)
_PIECES = re.compile(rf"""{_QUOTED}|(?:(?!\$')[^'"])+""")
_WRITTEN = {
    "WANDB_API_KEY": r"wandb\s+login(?:\s+--\S+)*\s+([\w-]{20,})",
    "HF_TOKEN": r"\b(hf_[A-Za-z0-9]{16,})",
}  # as a plain word


def of_script(text: str) -> tuple[str, dict[str, str]]:
    """(a script with its variable for each secret, the values). A flag whose library reads the variable is left out."""
    batch = bool(re.match(r"\s*@?echo off", text, re.I))
    reference = "%{}%" if batch else '"${{{}:-}}"'
    values: dict[str, str] = {}

    def assigned(found: re.Match[str]) -> str:
        name, value = found["name"], _literal(found["value"], batch)
        if not value or not is_secret(name, value):
            return found[0]
        values[name] = value
        return f"{found.groupdict().get('head') or ''}{name}={reference.format(name)}"

    def flagged(found: re.Match[str]) -> str:
        flag, value = found["name"].replace("-", "_"), _literal(found["value"], batch)
        if not value or not is_secret_flag(flag):
            return found[0]
        variable = FLAGS.get(flag, flag.upper())
        values[variable] = value
        return "" if flag in FLAGS else f"--{found['name']} {reference.format(variable)}"

    if any(f"--{flag}" in text for flag in FLAGS):
        text = _resolved(text, batch, values)
    text = _ASSIGNED.sub(assigned, _BATCH_SET.sub(assigned, _FLAGGED.sub(flagged, text)))
    plain = {name: found[1] for name, written in _WRITTEN.items() if (found := re.search(written, text))}
    values = {**values, **{name: value for name, value in plain.items() if name not in values}}
    for name, value in (*plain.items(), *values.items()):  # also one that is written a second time
        if len(value) >= WORTH:
            text = text.replace(value, f"%{name}%" if batch else f"${{{name}:-}}")
    return text, values


def _literal(written: str, batch: bool) -> str:
    """The value of a word as it is written; "" where only the shell knows it."""
    pieces = [piece for piece in _PIECES.findall(written) if piece not in ("''", '""')]
    if pieces not in ([], [written]) and not batch:  # such as abc"def"
        values = [_literal(piece, batch) for piece in pieces]
        return "".join(values) if all(values) else ""
    if written.startswith("$'"):
        from presets.shell import ESCAPE, unescaped

        return ESCAPE.sub(unescaped, written[2:-1])
    inner = written[1:-1] if written[:1] in "'\"" and written[-1:] == written[:1] and len(written) > 1 else written
    if not written.startswith("'") and re.search(r"%\w+%" if batch else r"[$`]", inner):
        return ""
    return inner.replace("^", "") if batch else inner


def _resolved(text: str, batch: bool, values: dict[str, str]) -> str:
    """The script without known flags whose value comes from a variable that the script sets; adds to `values`."""
    from presets import PresetError
    from presets.training import trainings

    try:
        found = trainings(text, "train.bat" if batch else "train.sh")
    except (PresetError, RecursionError, ValueError):
        return text
    for training in found:
        for flag, variable in FLAGS.items():
            known = training.flags.get(flag)
            if known and known.words and (value := (known.values or [None])[0]) and len(value) >= WORTH:
                values[variable] = value
                text = re.sub(rf"""--{flag}(?:=|[ \t]+)(?:"\$\{{?\w+\}}?"|\$\{{?\w+\}}?|%\w+%)""", "", text)
    return text
