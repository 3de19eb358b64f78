"""A server behind a login for the tests of this folder that only send requests, and starts that are refused."""

import os
import subprocess
import sys

import pytest
from ui_helpers import PROJECT, serving
from ui_requests import PASSWORD

import app


@pytest.fixture(scope="session")
def listening(tmp_path_factory):
    """A server for other machines: behind a login, and behind proxies of two kinds."""
    root = tmp_path_factory.mktemp("listen")
    flags = ("--listen", "--allow-host", "train.example.org")
    env = {"HANGPROOF_AUTH": f"me:{PASSWORD}", "HANGPROOF_ALLOWED_HOSTS": "*.proxy.runpod.net, third.example.org"}
    with serving(root / "data", *flags, **env) as running:
        yield running


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """`refused(*arguments, prefix=(), **env)`: a start that ends with code 1; its message of one or two lines.

    prefix: a command that starts the page as a process of its own; without it, the start is a call here.
    """

    def start(*arguments: str, prefix: tuple = (), **env: str) -> str:
        env = {"HANGPROOF_DATA": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config"), **env}
        if prefix:
            command = [*prefix, sys.executable, "app.py", "--no-browser", *arguments]
            pipes = {"capture_output": True, "text": True, "timeout": 200}
            done = subprocess.run(command, cwd=PROJECT, env={**os.environ, **env}, **pipes)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            for name, value in env.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(app.signal, "signal", lambda *_: None)
            code = app.main(["--no-browser", *arguments])
            out, err = capsys.readouterr()
        assert code == 1 and out == "" and "Traceback" not in err and len(err.splitlines()) <= 2, err
        return err

    return start
