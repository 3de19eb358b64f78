"""Shared by the tests of runs: a temporary data root, test images, a launcher that only prints its arguments."""

import contextlib
import functools
import importlib
import importlib.util
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

import runs
from runs.dataset import Source

PROJECT = Path(__file__).resolve().parents[2]
STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done
"""


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """An empty data root."""
    root = made(tmp_path / "data")
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    return root


def picture(path: Path, size=(96, 64), mode="RGB", **save) -> Path:
    """An image with four quarters of different colours, so that a rotation is visible."""
    image = Image.new("RGB", size, "red")
    w, h = size
    image.paste("lime", (w // 2, 0, w, h // 2))
    image.paste("blue", (0, h // 2, w // 2, h))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path, **save)
    return path


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def pictures(folder: Path, count: int = 3) -> Path:
    """A folder with images and without captions."""
    for i in range(count):
        picture(folder / f"{i}.png")
    return folder


def sources(paths, captions=None) -> list[Source]:
    """Images to make a run of, with their captions by file name."""
    return [Source(path, path.name, (captions or {}).get(path.name, "")) for path in paths]


def spec(**fields) -> "runs.RunSpec":
    """A valid spec with some fields changed."""
    return runs.make({"name": "my lora", "trigger": "ohwx", "model": "flux-dev", "backend": "diffusers", **fields})


def folder_of(tmp_path: Path, **fields) -> Path:
    """A new run with three images."""
    return runs.create(spec(**fields), pictures(tmp_path / "in"))


def stub(folder: Path) -> Path:
    """A launcher that prints its arguments, each followed by a NUL."""
    return executable(folder / "accelerate stub", STUB)


def encode(text: str) -> bytes:
    """Text as the bytes of an argument; surrogates become the bytes of a path that is not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def run_script(script: str | Path, launcher: Path | None, **env: str) -> subprocess.CompletedProcess:
    """Run a script in bash, with `launcher` as the interpreter ($TRAINER_PYTHON) and as accelerate ($ACCELERATE)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("ACCELERATE", "TRAINER_PYTHON", "PYTHONPATH")} | env
    timeout_s = float(environment.pop("TIMEOUT_S", "300"))
    if launcher:
        environment |= {"TRAINER_PYTHON": str(launcher), "ACCELERATE": str(launcher)} | env
    return subprocess.run(["bash", str(script)], capture_output=True, timeout=timeout_s, env=environment, check=False)


def arguments_of(result: subprocess.CompletedProcess) -> list[bytes]:
    """The arguments that the stub printed."""
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout.split(b"\0")[:-1]


def python(*words: str, cwd: Path = PROJECT, timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
    """Run a command of the project like a user."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=os.environ | env)


def call(module: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    """`python -m MODULE WORDS` in this process: exit code and output. For commands that start no training."""
    name = f"{module}.__main__" if importlib.util.find_spec(module).submodule_search_locations else module
    file = functools.partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="surrogateescape", newline="")
    with mock.patch.dict(os.environ, env), file() as out, file() as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = importlib.import_module(name).main([str(word) for word in words])
            except SystemExit as end:
                code = end.code
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(words, code or 0, out.read(), err.read())


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def written(path: Path, content: str | bytes) -> Path:
    """A file with this content; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def executable(path: Path, text: str) -> Path:
    written(path, text).chmod(0o755)
    return path
