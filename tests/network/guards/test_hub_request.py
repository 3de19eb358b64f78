"""A hub that is out of reach from the start: said within seconds, waited for once and not for each file, and then the
library raises its own error. Every way in which a machine has no network is a real one."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import hub_server
import loopback
import netns
import pytest

from guards import hub_request

ROOT = Path(__file__).resolve().parents[3]
FILES = ("config.json", "tokenizer.json", "optional_1.json", "optional_2.json", "optional_3.json")
LOAD = f"""
import sys, time
import huggingface_hub.file_download as library
from guards.hub_request import reach
from huggingface_hub.errors import LocalEntryNotFoundError
from sd_scripts_patches import hub
load, began = hub._cache_first(library.hf_hub_download), time.monotonic()
for name in {FILES}:
    try:
        load("some/model", name)
    except LocalEntryNotFoundError as error:
        print("the library's own error for", name, flush=True)
print("waited", time.monotonic() - began, flush=True)
"""
LOST = """
ip link set lo up && ip link add lost0 type veth peer name lost1 && ip link set lost1 up && ip addr add 192.0.2.1/24 dev lost0 &&
ip link set lost0 up && ip route add default via 192.0.2.2 && ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:01 dev lost0 &&
mount --bind "$0" /etc/resolv.conf && exec "$@"
"""


def refused(stack, folder):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return [], f"http://127.0.0.1:{closed.getsockname()[1]}"


def silent(stack, folder):
    """The kernel accepts the connections; nobody reads them."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
    return [], f"http://127.0.0.1:{server.getsockname()[1]}"


def lost(stack, folder):
    """A network that loses every packet, to name servers as well."""
    (folder / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    return ["unshare", "--net", "--mount", "sh", "-c", LOST, str(folder / "resolv.conf")], ""


@contextmanager
def loading(case, folder, code=LOAD, **env):
    with ExitStack() as stack:
        prefix, endpoint = case(stack, folder)
        kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
        environment = {
            **kept, "HF_HOME": str(folder / "home"), "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT), "HANGPROOF_HUB_REACH_S": "5",
            **({"HF_ENDPOINT": endpoint} if endpoint else {}), **env,
        }  # fmt: skip
        command = [*prefix, sys.executable, "-c", code]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            yield process
            process.kill()


CASES = {case.__name__: case for case in (refused, silent, lost)}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The exit status and the log of each case; they wait at the same time."""
    with ExitStack() as stack:
        started = {}
        for name, case in CASES.items():
            if not (name == "lost" and netns.missing()):
                started[name] = stack.enter_context(loading(case, tmp_path_factory.mktemp(name)))
        found = {name: process.communicate(timeout=240)[0] for name, process in started.items()}
        return {name: (started[name].returncode, log) for name, log in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_without_a_network_the_library_raises_its_own_error_after_one_wait_for_all_files(logs, case):
    if case not in logs:
        pytest.skip(netns.missing())
    code, log = logs[case]
    assert code == 0, log
    assert log.count("the library's own error") == len(FILES)
    assert log.count("hangproof: waited 4 s for an answer about some/model from ") == 1
    assert log.count("is out of reach") == 1


def test_the_wait_is_on_the_log_before_it_ends_and_again(monkeypatch):
    monkeypatch.setattr(hub_request, "REPORT_S", 0.3)
    monkeypatch.setattr(hub_request, "FIRST_REPORT_S", 0.3)
    monkeypatch.setattr(hub_request.Patience, "reported_s", -1e9)
    said: list[str] = []
    patience = hub_request.Patience(60, "an answer", said.append)
    patience.pause_s = 1.2
    assert patience.pause(ConnectionRefusedError(111, "Connection refused"))  # one pause, in which it speaks
    assert len(said) >= 2 and all("Connection refused" in text and "giving up after 60 s" in text for text in said)


@pytest.mark.slow
def test_a_hub_that_answers_late_within_the_wait_is_used(tmp_path):
    """A network that comes up while the process starts."""
    server = hub_server.Hub({name: b"{}" for name in FILES})
    server.socket.close()
    code = LOAD.replace("some/model", "me/model") + "print('answered', reach.answered)"
    with loading(lambda *_: ([], server.url), tmp_path, code, HANGPROOF_HUB_REACH_S="60") as process:
        time.sleep(3)
        server.socket = socket.create_server(("127.0.0.1", server.server_port))
        with loopback.running(server):
            log, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "answered True" in log and "own error" not in log, log
