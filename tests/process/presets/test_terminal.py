"""The output of a command: what its terminal lacks, and readers that have read enough."""

import json
import os
import signal
import sys
from functools import partial
from subprocess import PIPE, Popen, run

import pytest
from runs_helpers import pictures, spec

import runs
from runs.paths import ROOT

PRINTS = "import sys; from presets import terminal; sys.exit(terminal.command({}))"


def test_an_encoding_that_lacks_characters_loses_no_line(tmp_path, data):
    folder = runs.create(spec(name="my run", prompts=["写真"]), pictures(tmp_path / "in"))
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "runs", "show", str(folder), "--json"]
    done = run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and b"\\u5199" in done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("does", ["lambda: print('x' * 10**6) or 0", "lambda: __import__('time').sleep(60)"])
def test_a_closed_pipe_and_ctrl_c_end_a_command_without_a_traceback(does):
    command = [sys.executable, "-c", PRINTS.format(f"lambda: print('begun', file=sys.stderr) or ({does})()")]
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # not so in a shell's background
    with Popen(command, cwd=ROOT, preexec_fn=heard, stdout=PIPE, stderr=PIPE) as process:
        process.stdout.close()
        assert process.stderr.readline() == b"begun\n"
        if "sleep" in does:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr.read() == b""


def test_a_name_from_elsewhere_reaches_no_clipboard_and_hides_no_line():
    name = "\x1b]52;c;eA==\x07\x1b[31m写\t真\x1b[0m\x9b2J\u202e\rb\r\n"
    does = f"lambda: sys.stdout.write({name!r}) and print({name!r}, end='', file=sys.stderr)"
    done = run([sys.executable, "-c", PRINTS.format(does)], cwd=ROOT, capture_output=True, timeout=60, check=True)
    shown = "\\u001b]52;c;eA==\\u0007\x1b[31m写\t真\x1b[0m\\u009b2J\\u202e\\u000db\r\n"
    assert done.stdout.decode() == done.stderr.decode() == shown


def test_a_network_drive_that_is_gone_is_named_in_a_line():
    for where, says in (
        (", '/nas/outputs'", "error: [Errno 116] Stale file handle: '/nas/outputs'; check"),
        ("", "Traceback"),
    ):
        raises = f"lambda: (_ for _ in ()).throw(OSError(116, 'Stale file handle'{where}))"
        done = run([sys.executable, "-c", PRINTS.format(raises)], cwd=ROOT, capture_output=True, timeout=60)
        assert done.returncode == 1 and done.stderr.decode().startswith(says), done.stderr
