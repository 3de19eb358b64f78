"""A run's LoRAs as one archive."""

import asyncio
import io
import os
import threading
import zipfile

import pytest
from starlette.requests import Request
from ui_helpers import a_run, lora_file, write_run

import runs
from ui import served
from ui.run import view


def test_an_archive_holds_the_complete_loras_and_nothing_from_elsewhere(data, monkeypatch):
    folder = a_run(data, "with loras", 1e-4)
    lora_file(folder / f"{folder.name}-step000020.safetensors", 20)
    final = lora_file(folder / f"{folder.name}.safetensors", 60)
    (folder / "cut.safetensors").write_bytes(final.read_bytes()[:100])  # still written
    lora_file(data / "elsewhere.safetensors", 1)
    os.symlink(data / "elsewhere.safetensors", folder / "link.safetensors")
    stream = served.archive(folder)
    whole = b"".join(stream)
    assert len(whole) == len(served.archive(folder))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        name = folder.name
        files = ("run.toml", "sample_prompts.txt", f"{name}-step000020.safetensors", f"{name}.safetensors")
        assert sorted(archive.namelist()) == [f"{name}/{file}" for file in files]
        assert archive.read(f"{name}/{name}.safetensors") == final.read_bytes()
    with pytest.raises(runs.RunError, match="no LoRA yet"):
        served.archive(write_run(data, "empty"))
    folder.rename(folder.with_name("a%20b"))
    path = "/downloads/a%20b.zip"  # as the server has decoded it
    scope = {"type": "http", "method": "HEAD", "path": path, "headers": []}
    threads, real = [threading.get_ident()], view.folder_of
    monkeypatch.setattr(view, "folder_of", lambda name: (threads.append(threading.get_ident()), real(name))[1])
    assert asyncio.run(served.respond_archive(Request(scope))).status_code == 200
    assert threads[1] != threads[0], "a disk that does not respond does not stop the server"
