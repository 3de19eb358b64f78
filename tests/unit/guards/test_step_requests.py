"""Requests that a training reads between two steps, and the extra checkpoints that the monitor asks for."""

from unittest.mock import Mock

from monitor_helpers import events

from guards import step_requests
from guards.reading import boot_id
from monitor import config
from monitor.run_folder import RunFolder
from monitor.store import StoreAgent, StoreView, extra_save_due


def test_a_request_that_the_training_dies_at_is_refused_in_the_end(tmp_path):
    name = step_requests.ask(tmp_path, "save")
    for _ in range(step_requests.TRIES):
        assert step_requests.StepRequests(tmp_path).pending(5) == ("save",)  # and then the process is killed
    assert step_requests.StepRequests(tmp_path).pending(6) == ()
    (found,) = events(tmp_path)
    assert found["id"] == name and not found["done"] and "ended 2 times" in found["message"]


def test_a_request_waits_while_the_disk_is_full(tmp_path, monkeypatch):
    name = step_requests.ask(tmp_path, "state")
    with monkeypatch.context() as patched:
        patched.setattr(step_requests, "atomic_write", Mock(side_effect=OSError(28, "No space left on device")))
        assert step_requests.StepRequests(tmp_path).pending(5) == ()
    assert step_requests.StepRequests(tmp_path).pending(6) == ("state",) and not events(tmp_path)
    assert step_requests.ask(tmp_path, "state") == name


def test_a_damaged_request_is_a_request(tmp_path):
    step_requests.path_of(tmp_path, "sample").write_bytes(b"\xff{")
    reader = step_requests.StepRequests(tmp_path)
    assert reader.pending(1) == ("sample",)
    reader.done("sample", 1, "1 sample image")
    assert not step_requests.waiting(tmp_path)
    (found,) = events(tmp_path)
    assert (found["message"], found["done"]) == ("1 sample image of step 1, as requested", True)
    assert (found["request"], found["step"], found["boot"]) == ("sample", 1, boot_id()[:8])
    assert 0 <= found["took_s"] < 60
    assert step_requests.answer([{"kind": "x", "id": ""}, found], "") is found


def test_only_rank_0_reads_requests(tmp_path):
    step_requests.ask(tmp_path, "state")
    assert step_requests.StepRequests.from_env({"HANGPROOF_RUN": str(tmp_path), "RANK": "1"}).pending(1) == ()
    for rank in ("0", ""):
        reader = step_requests.StepRequests.from_env({"HANGPROOF_RUN": str(tmp_path), "RANK": rank})
        assert reader.pending(1) == ("state",)
    assert step_requests.StepRequests.from_env({}).pending(1) == ()


def test_extra_saves_are_due_between_two_regular_ones():
    for every, count, expected in (
        (40, 1, {20: 20, 29: 20, 60: 60}),  # half-way, and until the next regular save is nearer than a quarter
        (10, 2, {4: 3, 7: 7, 8: 7, 14: 13}),
        (3, 1, {}),  # too short
        (4, 1, {2: 2}),
        (40, 0, {}),
        (0, 1, {}),
    ):
        found = {step: at for step in range(70) if (at := extra_save_due(step, every, count)) is not None}
        assert expected.items() <= found.items() and bool(found) is bool(expected)
        assert all(step % every > 0 and at <= step for step, at in found.items())


def test_an_extra_save_is_requested_once_and_not_while_one_is_copied_or_saving_is_slow(tmp_path):
    (tmp_path / "run.toml").write_text("save_every_n_steps = 40\n", encoding="utf-8")
    store = StoreAgent(RunFolder(tmp_path), config.load().store)

    def requested(step, save_s, pending=""):
        before, store.view = store._requested, StoreView(pending=pending)
        store.request_save(step, 1.0, save_s)
        return store._requested > before

    assert not requested(21, 0.1, pending="the checkpoint of step 20")
    assert not requested(21, 0.9)  # 2 % of an interval are 0.8 s
    assert requested(22, 0.1)
    assert not requested(23, 0.1)
    assert step_requests.waiting(tmp_path) == ("state",)
    assert requested(60, 0.0)  # too short to be seen
