"""What the hub is asked, and its answers: refusals, a busy server, and a hub that is out of reach, which is waited for
once, not for each file; then the library raises its own error. Each way of having no network is a real one."""

import math
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import children
import netns
import pytest
from download_helpers import NAME, get

from guards import hub as guarded
from guards.hub import DownloadError

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


@pytest.mark.slow
def test_without_a_network_the_library_raises_its_own_error_after_one_wait_for_all_files(tmp_path, monkeypatch):
    """At once: a closed port, a server that reads nothing, a network that loses each packet, to name servers too."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    lost = ["unshare", "--net", "--mount", "sh", "-c", LOST, str(tmp_path / "resolv.conf")]

    def load(name: str, port: int | None) -> None:
        env = children.environment(HF_HOME=tmp_path / name, no_proxy="127.0.0.1", HANGPROOF_HUB_REACH_S=5)
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}"} if port else {}
        command = [*([] if port else lost), sys.executable, "-c", LOAD]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=env, **both, text=True, timeout=240, check=True)
        assert done.stdout.count("the library's own error") == len(FILES), (name, done.stdout)
        assert done.stdout.count("hangproof: the hub is out of reach") == 1, (name, done.stdout)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent, ThreadPoolExecutor(3) as pool:
        cases = [("refused", refused), ("silent", silent.getsockname()[1])]  # the kernel accepts
        list(pool.map(load, *zip(*cases, *([] if netns.missing() else [("lost", None)]), strict=True)))
    if reason := netns.missing():
        pytest.skip(f"not with a network that loses every packet: {reason}")


def test_a_socks_proxy_of_the_environment_is_used():
    """The library reads every proxy at its first request, and fails where one is of a kind that it has no package for."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(60)
        names = {"ALL_PROXY": f"socks5://127.0.0.1:{proxy.getsockname()[1]}", "HF_ENDPOINT": "http://hub.invalid"}
        child = children.start("from guards import hub; hub.listing('some/model')", HF_HUB_OFFLINE=0, **names)
        try:
            assert proxy.accept()[0].recv(1) == b"\x05", "the greeting of SOCKS5"
        finally:
            child.kill()
            child.wait()


@pytest.mark.slow
def test_a_silent_server_ends_the_first_request_at_its_own_limit(hub, tmp_path, monkeypatch):
    """A busy one is asked again until then."""
    monkeypatch.setenv("HANGPROOF_HUB_REACH_S", "1")
    hub.silent = True
    with pytest.raises(DownloadError, match="no data from .* for 1 s"):
        get(tmp_path / "d" / NAME, stall_s=300)
    hub.silent, hub.refusal = False, (429, "")
    threading.Timer(0.5, lambda: setattr(hub, "refusal", None)).start()
    get(tmp_path / "d" / NAME)


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("hashes", False, "is not the list of files of a model hub"),
        ("files", {}, "is not the list of files of a model hub .*it names no file"),
        ("row", lambda name: {"rfilename": name, "size": math.inf, "blobId": "0" * 40}, "is not the list of files"),
        ("redirect", "file:///etc/hostname", "unsupported protocol .*check HF_ENDPOINT"),
    ],
)
def test_a_server_that_is_no_hub_is_refused_at_its_first_wrong_answer(hub, tmp_path, what, value, message):
    setattr(hub, what, value)
    with pytest.raises(DownloadError, match=message):
        get(tmp_path / "d" / NAME)
    assert len(hub.requests) == 1 + (what == "redirect")


def test_the_token_goes_to_the_hub_only_and_into_no_message(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(tmp_path / "d" / NAME)
    sent = {path.startswith("/cdn/"): headers.get("authorization") for _, path, headers in hub.requests}
    assert sent == {False: "Bearer hf_secret", True: None}
    hub.refusal = (403, "GatedRepo")
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("://", "://me:hf_secret@"))
    with pytest.raises(DownloadError, match="A token is set") as error:
        get(tmp_path / "d" / "other")
    assert guarded.shown() == hub.url and guarded.endpoint() != hub.url
    out, err = capfd.readouterr()
    assert "secret" not in f"{error.value}{out}{err}"
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hf_secret" in p.read_bytes()]
