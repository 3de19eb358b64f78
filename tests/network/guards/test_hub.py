"""A hub that is out of reach: waited for once, not for each file; then the library raises its own error. Each way of
having no network is a real one."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import netns
import pytest

from guards import hub

ROOT = Path(__file__).resolve().parents[3]
FILES = ("config.json", "tokenizer.json", "optional_1.json", "optional_2.json", "optional_3.json")
LOAD = f"""
from sd_scripts_patches import hub
hub.prepare(True)
import huggingface_hub.file_download as library
from huggingface_hub.errors import LocalEntryNotFoundError
load = hub._cache_first(library.hf_hub_download)
for name in {FILES}:
    try:
        load("some/model", name)
    except LocalEntryNotFoundError as error:
        print("the library's own error for", name, flush=True)
"""
LOST = """
ip link set lo up && ip link add lost0 type veth peer name lost1 && ip link set lost1 up &&
ip addr add 192.0.2.1/24 dev lost0 && ip link set lost0 up && ip route add default via 192.0.2.2 &&
ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:01 dev lost0 && mount --bind "$0" /etc/resolv.conf && exec "$@"
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
def loading(case, folder):
    with ExitStack() as stack:
        prefix, endpoint = case(stack, folder)
        kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
        environment = {
            **kept, "HF_HOME": str(folder / "home"), "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT),
            "HANGPROOF_HUB_REACH_S": "5", **({"HF_ENDPOINT": endpoint} if endpoint else {}),
        }  # fmt: skip
        command = [*prefix, sys.executable, "-c", LOAD]
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
    assert log.count("hangproof: the hub is out of reach") == 1


def test_the_wait_is_on_the_log_before_it_ends_and_again(monkeypatch):
    monkeypatch.setattr(hub, "REPORT_S", 0.3)
    monkeypatch.setattr(hub, "FIRST_REPORT_S", 0.3)
    said: list[str] = []
    monkeypatch.setattr(hub, "say", said.append)
    patience = hub.Patience(60, "an answer")
    patience.pause_s = 1.2
    patience.pause(ConnectionRefusedError(111, "Connection refused"), hub.Options())  # in which it speaks
    assert len(said) >= 2 and all("Connection refused" in text and "giving up after 60 s" in text for text in said)
