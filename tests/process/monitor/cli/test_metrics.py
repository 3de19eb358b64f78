"""What Prometheus reads of the runs."""

import argparse
import contextlib
import json
import sys
import urllib.error
import urllib.request

import psutil
import pytest
from monitor_helpers import STATUS, toy_run

from monitor.cli import commands, metrics
from monitor.run_folder import MonitorError, RunFolder


def test_prometheus_text_names_every_run_and_escapes_its_name():
    page = metrics.text([STATUS])
    assert 'hangproof_step{run="my \\"lora\\""} 12\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="running"} 1\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="failed"} 0\n' in page
    assert "# TYPE hangproof_restarts_total counter\n" in page
    assert 'hangproof_last_progress_timestamp_seconds{run="my \\"lora\\""} 1767323045.5' in page
    assert metrics.text([]) == "\n"
    damaged = {key: [1] for key in STATUS} | {"state": "running", "updated_at": "soon"}
    assert set(page.splitlines()) < set(metrics.text([damaged, STATUS]).splitlines()), "it costs the others nothing"
    assert r'{run="a	b\n\\t"} 12' in metrics.text([{**STATUS, "name": "a\tb\n\\t"}]), "a tab has no escape"


def test_metrics_are_served_on_this_machine_only_and_other_paths_say_so(tmp_path, spawn):
    folder = toy_run(tmp_path / "outputs" / "toy")
    RunFolder(folder).write_status({**STATUS, "name": "toy"})
    with pytest.raises(MonitorError, match="port 99999 cannot be used: ports end at 65535; choose another with --port"):
        commands.metrics(argparse.Namespace(port=99999))
    words = (sys.executable, "-m", "monitor", "metrics", "--port", "0", "--json")
    process = spawn(*words, HANGPROOF_DATA=str(tmp_path))
    process.stdout.readline()
    port = json.loads(process.stdout.readline())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'hangproof_step{run="toy"} 12' in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    hosts = {"localhost:1": True, "[::1]": True, "evil.example": False, "127.0.0.1.evil.example": False}
    for host, served in hosts.items():  # a website whose name leads to this machine reads nothing
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        with contextlib.nullcontext() if served else pytest.raises(urllib.error.HTTPError, match="403: .*localhost"):
            urllib.request.urlopen(asked, timeout=10).close()
    assert 0 < (metrics.Handler.timeout or 0) <= 60, "a client that sends nothing keeps no thread"
    listening = [c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
