"""What the machines of a run send each other: only what is signed, new, well-formed and about their own ranks counts."""

import contextlib
import dataclasses
import http.client
import json
import socket
import time
from pathlib import Path

import pytest

from guards.heartbeat import Beat, Heartbeat, read
from monitor.config import load
from monitor.detect.progress import Signals
from monitor.nodes import endpoint, files, wire
from monitor.nodes.leader import SETTLE_S, Nodes, Part, first_cause, gather
from monitor.nodes.node import Client
from monitor.process.platform import ProcessInfo
from monitor.run_folder import MonitorError, RunFolder

TOKEN = b"a secret that is long enough"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "outputs" / "toy").mkdir(parents=True)
    return RunFolder(tmp_path / "outputs" / "toy")


@pytest.fixture
def nodes(folder):
    """A leader of two machines with one rank each, that listens."""
    made = Nodes(folder, 2, 1, ("127.0.0.1", free_port()), TOKEN, load().nodes)
    made.open(endpoint.serve)
    yield made
    made.stop_listening()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def beat(tmp_path: Path, rank: int = 1, **fields) -> Beat:
    """A beat as a real heartbeat gives it."""
    written = Heartbeat(tmp_path / f"rank-{rank}.hb", rank, 2)
    written.phase("step")
    written.step(7, loss=0.5, lr=1e-4)
    return dataclasses.replace(read(tmp_path / f"rank-{rank}.hb"), **fields)


def report(**fields) -> wire.Report:
    return wire.Report(**{"node": 1, "session": "s", "mono_s": time.monotonic(), **fields})


def client(nodes: Nodes, token: bytes = TOKEN) -> Client:
    return Client((nodes.host, nodes.port), token, 5.0)


def contact(nodes: Nodes, asks: Client, **fields) -> dict:
    """Report twice, as a node does whose challenge is old; the second answer."""
    values = wire.values_of(report(**fields))
    first = asks.ask(wire.POLL, values)
    return asks.ask(wire.POLL, values | {"challenge": first["challenge"]})


def test_every_message_survives_the_wire_as_it_was(tmp_path):
    process = ProcessInfo(5, 1.5, 1, "S", "python", 0.1, 0)
    sent = report(beats=(beat(tmp_path),), living=(process,), stacks={5: "x"}, stuck=("a",), code=-9, killed=("b",))
    assert wire.report_of(wire.decode(wire.encode(wire.values_of(sent))), 2, 1) == sent
    order = wire.Order("run", "g", "toy", 3, changes=("workers_0",))
    assert wire.parse(wire.Order, wire.decode(wire.encode(wire.values_of(order)))) == order


def test_every_moment_of_a_beat_is_translated_and_nothing_else(tmp_path):
    """A new field of Beat that is a moment must be named in wire.py."""
    made = beat(tmp_path, reached=(5.0, 0.0), spent=(1.0, 2.0))
    there = wire.here(made, 1, 1000.0)
    changed = {f.name for f in dataclasses.fields(Beat) if getattr(made, f.name) != getattr(there, f.name)}
    assert changed == {"pid", *wire.MOMENTS, *wire.MOMENT_LISTS}
    assert there.reached == (1005.0, 0.0) and there.step_s == made.step_s + 1000.0
    durations = {"waited_s"}
    moments = {f.name for f in dataclasses.fields(Beat) if f.name.endswith("_s")} - durations
    assert moments == set(wire.MOMENTS)


def test_a_clock_is_compared_by_its_fastest_message_and_follows_a_suspension():
    clock = wire.Clock()
    for i, late in enumerate((0.3, 0.01, 5.0, 0.2)):
        clock.compare(1000.0 + i + late, i)
    assert clock.offset_s == pytest.approx(1000.01)
    for i in range(wire.OFFSETS):  # it slept for an hour, and its clock with it
        clock.compare(4700.0 + i, 100.0 + i)
    assert clock.offset_s == pytest.approx(4600.0)


WRONG = {
    "a rank of another machine": lambda v: v["beats"][0].update(rank=0),
    "a rank that does not exist": lambda v: v["beats"][0].update(rank=7),
    "a machine that does not exist": lambda v: v.update(node=2),
    "the leader itself": lambda v: v.update(node=0),
    "an unknown phase": lambda v: v["beats"][0].update(phase="coffee"),
    "an unknown outcome": lambda v: v["beats"][0].update(outcome="great"),
    "a time that is no number": lambda v: v["beats"][0].update(beat_s=float("nan")),
    "a clock that is infinite": lambda v: v.update(mono_s=float("inf")),
    "text for a number": lambda v: v["beats"][0].update(step="7"),
    "true for a number": lambda v: v["beats"][0].update(step=True),
    "a huge number": lambda v: v["beats"][0].update(step=1 << 70),
    "a huge pid": lambda v: v["beats"][0].update(pid=wire.NODE_PIDS),
    "a negative pid": lambda v: v["living"][0].update(pid=-1),
    "a list for text": lambda v: v.update(note=["x"]),
    "too many beats": lambda v: v.update(beats=v["beats"] * (wire.ITEMS + 1)),
    "a long text": lambda v: v.update(log_tail="x" * (wire.TEXT + 1)),
    "a missing field": lambda v: v["beats"][0].pop("rank"),
    "an unknown phase of the node": lambda v: v.update(phase="asleep"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_report_is_refused(what, tmp_path):
    living = (ProcessInfo(5, 1.5, 1, "S", "python", 0.1, 0),)
    values = wire.decode(wire.encode(wire.values_of(report(beats=(beat(tmp_path),), living=living))))
    assert wire.report_of(values, 2, 1).beats
    WRONG[what](values)
    with pytest.raises(wire.WireError):
        wire.report_of(values, 2, 1)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"a":', b"1"])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(wire.WireError):
        wire.decode(data)


def posted(nodes: Nodes, path: str, body: bytes | None, headers: dict) -> int:
    """The status of the leader's answer."""
    with contextlib.closing(http.client.HTTPConnection(nodes.host, nodes.port, timeout=5)) as connection:
        connection.request("POST", path, body, headers)
        return connection.getresponse().status


def test_nothing_is_answered_without_the_secret(nodes):
    with pytest.raises(OSError, match="another HANGPROOF_NODE_TOKEN"):
        client(nodes, b"b secret that is long enough").ask(wire.POLL, wire.values_of(report()))
    for path, headers, status in (
        (wire.POLL, {}, 403), (wire.FILE, {wire.SIGNATURE: "x"}, 403), ("/", {}, 404),
        (wire.POLL, {"Content-Length": str(wire.REQUEST_BYTES + 1)}, 413), (wire.POLL, {"Content-Length": "-1"}, 404),
    ):  # fmt: skip
        assert posted(nodes, path, b"{}" if "Content-Length" not in headers else None, headers) == status
    assert nodes.status()[0]["silent_s"] is None


def test_more_connections_than_the_leader_takes_are_closed_and_silent_ones_cost_the_nodes_nothing(nodes, monkeypatch):
    silent = [socket.create_connection((nodes.host, nodes.port)) for _ in range(endpoint.REQUESTS)]
    time.sleep(0.3)
    with pytest.raises(OSError):
        client(nodes).ask(wire.POLL, wire.values_of(report()))
    for connection in silent:
        connection.close()
    until = time.monotonic() + endpoint.IDLE_S
    while time.monotonic() < until:
        try:
            assert "challenge" in client(nodes).ask(wire.POLL, wire.values_of(report()))
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the leader answers nobody any more")


def test_a_signature_is_of_one_path_and_one_body(nodes):
    body = wire.encode(wire.values_of(report()))
    good = wire.sign(TOKEN, b"request", wire.POLL.encode(), body)
    for path, sent in ((wire.LIST, body), (wire.POLL, body + b" ")):
        assert posted(nodes, path, sent, {wire.SIGNATURE: good}) == 403


def test_a_replayed_report_changes_nothing(nodes):
    nodes.waiting()
    asks = client(nodes)
    values = wire.values_of(report(progress="first"))
    challenge = asks.ask(wire.POLL, values)["challenge"]
    old = values | {"challenge": challenge}
    assert "order" in asks.ask(wire.POLL, old)
    link = nodes._links[1]
    link.report = dataclasses.replace(link.report, progress="seen")
    assert "order" not in asks.ask(wire.POLL, old)
    assert link.report.progress == "seen"


def test_an_answer_of_somebody_else_is_refused(nodes, monkeypatch):
    asks = client(nodes)
    monkeypatch.setattr(nodes, "token", b"c secret that is long enough")
    monkeypatch.setattr(wire, "signed_by", lambda *a: a[2] == b"request")  # the false leader takes every request
    with pytest.raises(wire.WireError, match="not signed"):
        asks.ask(wire.POLL, wire.values_of(report()))


def test_a_node_gets_no_order_before_the_leader_knows_what_an_earlier_monitor_left(nodes):
    asks = client(nodes)
    assert "order" not in contact(nodes, asks)
    nodes.waiting()
    assert contact(nodes, asks)["order"]["want"] == "idle"


NAMES = ["run/../x", "/etc/passwd", "run//x", "dataset/..", "dataset/a/../../b", "state/x\\y", "state/c:/x", "run/train.sh.txt",
         "run/monitor.json", "other/x", "run", "", "dataset/\0", "dataset/" + "x" * 2000, "run/./run.toml"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(wire.WireError):
        files.listed({"files": [[name, 1, "0" * 64]]})


@pytest.mark.parametrize("name", ["", "x", "../x-state", "a/b-state", ".x-state", "a\\b-state"])
def test_only_the_name_of_a_state_is_one(name):
    assert not files.is_state(name)


def test_a_file_that_is_not_in_the_list_is_not_sent(nodes, folder, tmp_path):
    (folder.folder / "monitor.json").write_text("private")
    (folder.folder / "train.sh").write_text("echo hello")
    asks, target = client(nodes), tmp_path / "got"
    assert files.listed(asks.ask(wire.LIST, {})).keys() == {"run/train.sh"}
    asks.fetch("run/train.sh", 5, target)
    assert target.read_text() == "hello"
    refused = [("run/monitor.json", 0), ("run/../monitor.json", 0), ("run/train.sh", -1), ("run/train.sh", 999)]
    for name, offset in refused:
        with pytest.raises(OSError, match="refused"):
            asks.fetch(name, offset, target)


# ---- copying ----


def copier(nodes: Nodes, run: Path, fetch=None) -> files.Copier:
    run.mkdir(parents=True, exist_ok=True)
    return files.Copier(RunFolder(run), fetch or client(nodes).fetch, lambda _: None)


@pytest.fixture
def leaders(folder, monkeypatch, tmp_path):
    """A run with a spec, a data set and a state on the leader; a function that lists it, and where a node keeps its own."""
    (folder.folder / "run.toml").write_text("nodes = 2\n")
    folder.spec = {"nodes": 2}
    data = tmp_path / "datasets" / "toy"
    (data / "sub").mkdir(parents=True)
    (data / "sub" / "a.png").write_bytes(b"A" * 3000)
    (data / "a.npz").write_bytes(b"cache")
    (data / ".hidden").write_text("not copied")
    state = folder.folder / "toy-step00000010-state"
    state.mkdir()
    (state / "hangproof.json").write_text("{}")
    (state / "weights").write_bytes(bytes(range(256)) * 100)
    found = files.Catalogue(folder)
    monkeypatch.setattr(endpoint.files, "Catalogue", lambda _: found)

    def wanted() -> dict:
        with monkeypatch.context() as patch:
            patch.setenv("HANGPROOF_DATA", str(tmp_path))
            return files.listed({"files": found.entries(state.name, str(state))})

    return wanted, state


@pytest.fixture
def away(leaders, nodes, monkeypatch, tmp_path):
    """The data root of the node."""
    root = tmp_path / "node"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    return root


def test_a_node_gets_the_spec_the_data_set_and_the_state_and_nothing_twice(leaders, nodes, away, tmp_path):
    wanted, state = leaders
    listed = wanted()
    assert sorted(listed) == [
        "dataset/a.npz", "dataset/sub/a.png", "run/run.toml", f"state/{state.name}/hangproof.json", f"state/{state.name}/weights"
    ]  # fmt: skip
    asked = []

    def fetch(name, offset, path):
        asked.append((name, offset))
        client(nodes).fetch(name, offset, path)

    run = away / "outputs" / "toy"
    copier(nodes, run, fetch).copy(listed, state.name)
    assert (run / state.name / "weights").read_bytes() == (state / "weights").read_bytes()
    assert (away / "datasets" / "toy" / "sub" / "a.png").read_bytes() == b"A" * 3000
    assert len(asked) == 5
    copier(nodes, run, fetch).copy(listed, state.name)
    assert len(asked) == 5 and not list(away.rglob("*.part"))


def test_a_copy_that_was_cut_is_continued_and_a_wrong_one_is_thrown_away(leaders, nodes, away, tmp_path):
    wanted, state = leaders
    listed = {name: value for name, value in wanted().items() if name.startswith("state/")}
    run, name, offsets = away / "outputs" / "toy", f"state/{state.name}/weights", []

    def cut(what, offset, path):
        if what != name:
            return client(nodes).fetch(what, offset, path)
        offsets.append(offset)
        with open(path, "ab") as file:
            file.write((state / "weights").read_bytes()[offset : offset + 10_000])
        if len(offsets) < 3:
            raise ConnectionResetError("cut")

    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            copier(nodes, run, cut).copy(listed, state.name)
        assert not (run / state.name).exists()
    copier(nodes, run, cut).copy(listed, state.name)
    assert offsets == [0, 10_000, 20_000]
    assert (run / state.name / "weights").read_bytes() == (state / "weights").read_bytes()
    (run / state.name / "weights").write_bytes(b"damaged")
    with pytest.raises(files.CopyError, match="not what the leader listed"):
        copier(nodes, run, lambda what, offset, path: path.write_bytes(b"x" * listed[what][0])).copy(listed, state.name)
    assert (run / state.name / "weights").read_bytes() == b"damaged", "the old one stays until the new one is complete"


def test_a_data_set_of_the_nodes_user_is_never_changed(leaders, nodes, away, tmp_path):
    listed = leaders[0]()
    own = away / "datasets" / "toy" / "mine.png"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    with pytest.raises(MonitorError, match=r"differs from the leader's: mine\.png"):
        copier(nodes, away / "outputs" / "toy").copy(listed, "")
    assert own.read_bytes() == b"mine" and len(list(own.parent.iterdir())) == 1


def test_a_copied_data_set_follows_the_leaders(leaders, nodes, away, tmp_path):
    wanted, _ = leaders
    before = wanted()
    (tmp_path / "datasets" / "toy" / "sub" / "a.png").rename(tmp_path / "datasets" / "toy" / "b.png")
    after = wanted()
    (tmp_path / "datasets" / "toy" / "sub" / "a.png").write_bytes(b"A" * 3000)
    run = away / "outputs" / "toy"
    copier(nodes, run).copy(before, "")
    copier(nodes, run).copy(after, "")
    assert {p.name for p in (away / "datasets" / "toy").rglob("*") if p.is_file()} == {"a.npz", "b.png", files.COPIED}


def test_a_link_in_the_nodes_folder_leads_nowhere_else(leaders, nodes, away, tmp_path):
    listed = leaders[0]()
    outside = tmp_path / "outside"
    outside.mkdir()
    data = away / "datasets" / "toy"
    data.mkdir(parents=True)
    (data / files.COPIED).touch()
    (data / "sub").symlink_to(outside)
    with pytest.raises(MonitorError, match="is a link"):
        copier(nodes, away / "outputs" / "toy").copy(listed, "")
    assert not list(outside.iterdir())


# ---- the leader's decisions ----


def test_the_first_cause_is_an_error_then_a_kill_then_a_consequence(tmp_path):
    lost = beat(tmp_path, 0, outcome="failed", note="RuntimeError: [gloo] Connection closed by peer", pid=1)
    killed = beat(tmp_path, 1, outcome="running", pid=2)
    wrong = beat(tmp_path, 2, outcome="failed", note="KeyError: 'lora'", pid=3)
    gone = frozenset({1, 2, 3})
    assert first_cause([lost, killed, wrong], gone) is wrong
    assert first_cause([lost, killed], gone) is killed
    assert first_cause([lost, beat(tmp_path, 3, pid=4)], gone) is lost
    assert first_cause([beat(tmp_path, 3, pid=4)], frozenset()) is None


def test_a_part_that_fails_waits_a_moment_for_the_reason_of_the_others(nodes):
    here = Part(0, None, 1, None, "failed", "Connection closed by peer", None, "exit code 1")
    assert nodes.failed([], frozenset(), here) is None and nodes.settling
    nodes._failed_s -= SETTLE_S
    assert nodes.failed([], frozenset(), here) == here


def test_evidence_here_proves_nothing_before_every_machine_has_answered(nodes):
    nodes.waiting()
    nodes._give(want="run", group="g")
    nodes.ask_evidence()
    here = Signals(stuck=("asleep",), slow=())
    assert nodes.signals(here).stuck == ()
    contact(nodes, client(nodes), group="g", phase="running", evidence=nodes.order.evidence, slow=("reads at 3 MB/s",))
    assert nodes.signals(here) == Signals(("asleep",), ("node 1: reads at 3 MB/s",), ())


def test_a_node_that_forgot_its_part_is_lost(nodes):
    nodes.waiting()
    nodes._give(want="run", group="g")
    contact(nodes, client(nodes), group="g", phase="running")
    assert nodes.lost() is None
    nodes._ordered_s -= 60.0
    contact(nodes, client(nodes), session="another")
    assert "does not know its part" in nodes.lost().note


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "set HANGPROOF_LEADER"),
        ({"HANGPROOF_LEADER": "10.0.0.1"}, "write HOST:PORT"),
        ({"HANGPROOF_LEADER": "10.0.0.1:99999"}, "write HOST:PORT"),
        ({"HANGPROOF_LEADER": "10.0.0.1:29400"}, "HANGPROOF_NODE_TOKEN is not set"),
        ({"HANGPROOF_LEADER": "[::1]:29400", "HANGPROOF_NODE_TOKEN": "short"}, "fewer than 16"),
    ],
)
def test_what_the_environment_lacks_is_named(folder, environ, message):
    folder.spec = {"nodes": 2, "gpus": 1}
    with pytest.raises(MonitorError, match=message):
        gather(folder, environ, load().nodes)


def test_a_run_on_one_machine_has_no_nodes_and_needs_no_secret(folder):
    assert gather(folder, {}, load().nodes) is None
    folder.spec = {"nodes": 1}
    assert gather(folder, {"HANGPROOF_NODES": "5"}, load().nodes) is None


def test_an_address_of_another_machine_is_refused_with_the_reason(folder):
    made = Nodes(folder, 2, 1, ("192.0.2.1", 29400), TOKEN, load().nodes)  # RFC 5737: no machine has it
    with pytest.raises(MonitorError, match=r"192\.0\.2\.1:29400: this machine cannot listen there"):
        made.open(endpoint.serve)


def test_the_secret_is_in_no_answer(nodes, folder):
    nodes.waiting()
    answer = contact(nodes, client(nodes))
    assert TOKEN.decode() not in json.dumps(answer) + (folder.folder / "monitor.log").read_text()
