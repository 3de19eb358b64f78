"""Push, prune and restore: what is sent, what is kept, what a reader takes; on every kind of store, good and bad."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from runs_helpers import contents as files_of
from store_helpers import QUICK, acquired, add_state, belonging, held, log, make_run

from guards import checkpoint
from launch.store import copies
from launch.store.copies import Copier, NotHeld, each_manifest, manifest_names, newest_manifest
from launch.store.lease import Lease, this_owner
from launch.store.manifest import FILES, MANIFESTS, Memory
from launch.store.places import Limits, Place, Refused, StoreError, open_place
from launch.store.restore import restore
from runs.paths import datasets_dir, outputs_dir


class FakeLease:
    """A lease that believes it is held: that of a machine which was stopped while another took over."""

    def __init__(self, number: int, valid=lambda: True):
        self.number, self.valid, self.holder, self.owner = number, valid, "", this_owner()


def test_only_what_changed_is_sent_and_nothing_is_hashed_twice(run, place, monkeypatch):
    lease = held(place)
    copier = Copier(place, run, lease)
    first = copier.push()
    two_images_are_equal = len(first.manifest.files) - len({m.sha256 for m in first.manifest.files.values()})
    assert two_images_are_equal >= 2 and first.sent_files == len({m.sha256 for m in first.manifest.files.values()})
    for path in [*run.rglob("*"), *(datasets_dir() / run.name).rglob("*")]:
        os.utime(path, (1e9, 1e9))  # old enough to be remembered
    copier.push()
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest(file, kind))
    assert copier.push().manifest is None and not hashed
    log(run, "more")
    add_state(run, 20)
    second = copier.push()
    assert second.sent_files == 2 + 4 - 1, "the logs are equal, so they are one; four files of the state"
    assert set(second.manifest.states()) == {f"{run.name}-step00000010-state", f"{run.name}-step00000020-state"}
    hashed.clear()
    assert Copier(place, run, lease).push().manifest is None
    assert not [name for name in hashed if "step00000010" in name], "hashes survive the process"


def test_a_state_that_is_not_as_it_was_written_is_left_out(run, place):
    bad = add_state(run, 30)
    data = bytearray((bad / "optimizer.bin").read_bytes())
    data[100] ^= 1
    (bad / "optimizer.bin").write_bytes(data)
    pushed = Copier(place, run, held(place)).push()
    assert pushed.manifest.step == 10
    assert any("optimizer.bin is not as it was written" in note for note in pushed.notes)


def test_a_state_that_is_replaced_while_it_is_sent_is_left_out_whole(run, place, other, monkeypatch):
    monkeypatch.setattr(copies, "SMALL", 1000)
    copier = Copier(place, run, held(place))
    copier.push()
    shutil.rmtree(run / f"{run.name}-step00000010-state")
    state, left = add_state(run, 20), [2]
    write = place.write

    def write_and_delete(fs, key, source, meter):
        write(fs, key, source, meter)
        left[0] -= 1
        if not left[0]:
            shutil.rmtree(state)

    monkeypatch.setattr(place, "write", write_and_delete)
    pushed = copier.push()
    assert any("step00000020-state: not copied" in note for note in pushed.notes)
    log(run, "next")
    for newest in (pushed.manifest or copier.last, copier.push().manifest):
        assert list(newest.states()) == [f"{run.name}-step00000010-state"], "the last good one is carried on"
        copier.prune()
    other()
    assert restore(place, run.name).step == 10


def test_pruning_keeps_two_complete_manifests_and_deletes_the_rest(run, place, copier, other):
    assert copier.prune() == 0
    for step in (20, 30, 40):
        add_state(run, step)
        shutil.rmtree(run / f"{run.name}-step{step - 10:08}-state")
        copier.push()
        copier.prune()
    copier.push()
    copier.prune()
    names = [*manifest_names(place)]
    assert names == ["manifests/000001-000004.json", "manifests/000001-000003.json"]
    needed = {m.blob for _, manifest, _ in each_manifest(place, run.name) for m in manifest.files.values()}
    assert set(place.list(FILES)) == needed
    place.delete([names[0]])
    other()
    assert restore(place, run.name).step == 30


@pytest.mark.parametrize("gone", ["the drive", "a folder", "an image"])
def test_images_that_cannot_be_read_for_a_while_stay_in_the_store(run, place, copier, monkeypatch, gone):
    data, list_folder, read = datasets_dir() / run.name, os.scandir, Memory.local

    def refuse(path, what):
        if what == gone and str(path).startswith(str(data)):
            raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refuse(path, "a folder") or list_folder(path))
    monkeypatch.setattr(Memory, "local", lambda memory, path: refuse(path, "an image") or read(memory, path))
    before = {name: member for name, member in copier.last.files.items() if name.startswith("data/")}
    if gone == "the drive":
        data.rename(data.with_name("elsewhere"))
    for number in range(3):
        log(run, f"{number}")
        pushed = copier.push()
        copier.prune()
        assert before.items() <= pushed.manifest.files.items() and all(
            place.list(FILES)[m.blob] for m in before.values()
        )
    assert any("Input/output error" in note for note in pushed.notes) is (gone != "the drive")


def test_contents_that_another_writer_or_an_unreadable_manifest_needs_are_not_deleted(run, place, copier):
    log(run, "x")
    copier.push()
    place.put(f"{FILES}/{'a' * 64}", b"of a push under way")
    assert copier.prune() == 0
    assert f"{FILES}/{'a' * 64}" in place.list(FILES)
    log(run, "y")
    newest = copier.push().manifest
    place.put(newest.name, b"<html>")  # as a server answers for a moment
    assert copier.prune() == 0
    place.delete([newest.name])  # or lists what was there before
    assert copier.prune() == 0
    place.put(newest.name, newest.dumps())
    copier.prune()
    assert f"{FILES}/{'a' * 64}" not in place.list(FILES), "it was there before the last push, so nobody sends it"


def test_a_damaged_manifest_or_file_makes_the_one_before_it_count(run, place, copier, other, monkeypatch):
    first = belonging(run)
    add_state(run, 20, size=300_000)
    log(run, "later")
    second = copier.push().manifest
    bad = second.files[f"run/{run.name}-step00000020-state/model.safetensors"]
    place.put(bad.blob, b"x" * bad.size)  # the size is right, the contents are not
    other()
    done = restore(place, run.name)
    assert done.step == 10 and done.damaged == {bad.sha256}
    assert done.manifest.number == 1 and any("is damaged" in note for note in done.notes)
    assert belonging(outputs_dir() / run.name) == first
    with monkeypatch.context() as refusing, pytest.raises(Refused, match="no permission"):
        refusing.setattr(place, "_read", Mock(side_effect=Refused("no permission")))  # that is no damage
        restore(place, run.name)
    place.delete([bad.blob])
    other("third")
    assert restore(place, run.name).step == 10
    place.put(second.name, b"{")
    other("fourth")
    assert restore(place, run.name).step == 10


def test_damaged_contents_are_sent_again(run, place, other):
    first = held(place)
    pushed = Copier(place, run, first).push().manifest
    first.release()
    bad = pushed.files[f"run/{run.name}-step00000010-state/optimizer.bin"]
    place.put(bad.blob, b"x" * bad.size)
    other("empty")
    with pytest.raises(StoreError, match="copies of this run, and none is complete .*is damaged"):
        restore(place, run.name)  # it would train from step 0, and the copies would be pruned
    assert not (outputs_dir() / run.name / "run.toml").exists()
    other("home")
    copier = Copier(place, run, held(place), distrusted={bad.sha256})
    copier.push()
    other("third")
    assert restore(place, run.name).step == 10


def test_without_the_lease_nothing_is_written_and_one_lost_during_a_push_ends_it_before_the_manifest(run, place):
    lease = held(place)
    lease.release()
    for call in (Copier(place, run, lease).push, Copier(place, run, lease).prune):
        with pytest.raises(NotHeld, match="nothing was written"):
            call()
    assert set(place.list()) == {"lease/000001.json"}
    looks = iter([True] * 5)
    with pytest.raises(NotHeld):
        Copier(place, run, FakeLease(1, lambda: next(looks, False))).push()
    assert place.list(FILES) and not manifest_names(place)


def test_a_push_that_is_killed_anywhere_leaves_the_store_with_a_complete_manifest(run, place, other, monkeypatch):
    """Every write of the second push is the last one once: the store then restores the first or the second."""
    Copier(place, run, held(place)).push()
    before = belonging(run)
    add_state(run, 20)
    log(run, "second")
    after, ends, left = belonging(run), 0, [0]

    def counted(call):
        def write(*args):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            call(*args)

        return write

    for name in ("write", "write_new"):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    for writes in range(8):
        left[0] = writes
        other("home")
        with contextlib.suppress(KeyboardInterrupt):
            Copier(place, run, FakeLease(2)).push()
            ends += 1
        other(f"after {writes}")
        restore(place, run.name)
        assert belonging(outputs_dir() / run.name) == (after if ends else before)
    assert 0 < ends < 8


def test_an_image_that_is_a_link_is_copied_and_a_link_in_a_run_is_not(run, place, tmp_path, other):
    image = datasets_dir() / run.name / "0.png"
    data = image.read_bytes()
    image.rename(tmp_path / "photo.png")
    image.symlink_to(tmp_path / "photo.png")
    (tmp_path / "secret").write_text("secret")
    (run / "sample" / "link.png").symlink_to(tmp_path / "secret")
    (run / "sample" / "folder").symlink_to(tmp_path)
    pushed = Copier(place, run, held(place)).push()
    assert not [name for name in pushed.manifest.files if "link" in name or "folder" in name]
    assert any("a link or a special file" in note for note in pushed.notes)
    other()
    restore(place, run.name)
    assert (datasets_dir() / run.name / "0.png").read_bytes() == data


def test_a_log_that_grows_while_it_is_sent_is_stored_as_it_was_read(run, place, monkeypatch):
    write = place.write

    def growing(*args):
        log(run, "while it is sent")
        write(*args)

    monkeypatch.setattr(place, "write", growing)
    manifest = Copier(place, run, held(place)).push().manifest
    text = place.read(manifest.files["run/events.jsonl"].blob)
    assert (run / "events.jsonl").read_bytes().startswith(text)


@pytest.mark.parametrize("mitigated", [False, True])
def test_a_save_dir_is_copied_as_the_runs_own_and_newer_work_in_it_wins(home, tmp_path, other, mitigated):
    """It is the spec's, or one that the monitor chose because the run's own disk stalled."""
    local = tmp_path / "fast disk"
    folder = make_run(tmp_path, save_dir="" if mitigated else str(local))
    local = local if mitigated else local / folder.name  # of this run alone
    (folder / "monitor.json").write_text(json.dumps({"save_dir": str(local)} if mitigated else {}))
    place = open_place(str(tmp_path / "store"), QUICK).under(folder.name)
    local.mkdir(parents=True)

    def save(step: int) -> None:
        with checkpoint.writing(local / f"{folder.name}-step{step:08}-state", step, 1) as work:
            (work / "x").write_bytes(b"%d" % step)
        (local / f"{folder.name}.safetensors").write_bytes(b"lora")
        log(folder, f"step {step}")

    save(20)
    copier = Copier(place, folder, held(place))
    assert copier.push().manifest.step == 20
    save(40)
    mine = {name: data for name, data in files_of(folder).items() if name[0] != "."}
    done = restore(place, folder.name)
    assert (done.step, done.files) == (40, 0)
    assert {name: data for name, data in files_of(folder).items() if name[0] != "."} == mine
    copier.push()
    here = other() / folder.name
    restore(place, folder.name)
    assert checkpoint.verify(here / f"{folder.name}-step00000040-state").usable
    assert (here / f"{folder.name}.safetensors").read_bytes() == b"lora"
    assert str(local) not in (here / "monitor.json").read_text()


def test_a_stale_writers_manifest_never_wins_and_it_deletes_nothing(run, place):
    """A machine that was stopped while another took over believes that it holds the lease."""
    stale, later = Copier(place, run, FakeLease(1)), Copier(place, run, FakeLease(2))
    for number, copier in enumerate((stale, later, stale, stale)):
        log(run, f"push {number}")
        copier.push()
    assert newest_manifest(place, run.name).lease == 2
    before = place.list()
    with pytest.raises(NotHeld, match="later holder"):
        stale.prune()
    assert place.list() == before


def test_a_run_survives_on_every_store(server, run, other):
    """A full one, and one that fails every second request."""
    patient = Limits(call_s=60, tries=40, first_wait_s=0.01, longest_wait_s=0.02)
    place, faults = server.place(patient).under(run.name), server.faults
    copier = Copier(place, run, held(place))
    copier.push()
    add_state(run, 20, size=50_000)
    log(run, "second")
    faults.quota_bytes = faults.used_bytes + 60_000
    with pytest.raises(Refused, match="space"):
        copier.push()
    faults.clear()
    faults.fail_share = 0.5
    assert copier.push().manifest.step == 20
    before = belonging(run)
    other()
    done = restore(place, run.name)
    assert done.step == 20 and belonging(outputs_dir() / run.name) == before and faults.failed > 5


@pytest.mark.parametrize(
    ("call", "part", "said"),
    [("write", FILES, "that it had confirmed"), ("write_new", MANIFESTS, "cannot read manifests/000001-000002")],
)
def test_a_store_that_drops_what_it_confirmed_keeps_the_last_good_manifest(
    run, place, copier, monkeypatch, call, part, said
):
    write, dropped = getattr(place, call), []
    add_state(run, 20)

    def losing(fs, key, *more):
        write(fs, key, *more)
        if f"{part}/" in key and not dropped:
            dropped.append(key)
            os.unlink(key)

    monkeypatch.setattr(place, call, losing)
    with pytest.raises(StoreError, match=said):
        copier.push()
    assert newest_manifest(place, run.name).step == 10
    assert copier.push().manifest.step == 20 and dropped


@pytest.mark.slow
def test_of_three_machines_at_once_one_holds_and_the_others_say_who(server):
    """On every kind of store, and on an S3 server that ignores conditions: there the last claim in settle_s counts."""
    one_of_three_holds(server.place(QUICK).under("conditional"))
    if server.s3:
        server.s3.conditional = False
        one_of_three_holds(server.place(QUICK).under("unconditional"))


def one_of_three_holds(place: Place) -> None:
    leases = [Lease(place, period_s=60.0, settle_s=4.0, dead=lambda owner: False) for _ in range(3)]
    end = time.monotonic() + 240

    def contend(one: Lease) -> None:
        while not any(lease.valid() for lease in leases) and time.monotonic() < end:
            acquired(one, 1)

    with ThreadPoolExecutor() as pool:
        [*pool.map(contend, leases)]
    (winner,) = [one for one in leases if one.valid()]
    assert [(one.poll(), one.holder) for one in leases if one is not winner] == [("waiting", winner.owner.text())] * 2


def test_hashes_are_not_trusted_for_a_file_that_was_just_written(tmp_path):
    path, memory = tmp_path / "x", Memory(tmp_path)
    path.write_bytes(b"1111")
    first = memory.local(path)
    os.utime(path, ns=(first.key[1], first.key[1]))
    path.write_bytes(b"2222")
    os.utime(path, ns=(first.key[1], first.key[1]))  # within one tick of a coarse clock
    assert memory.local(path).sha256 != first.sha256 and not memory._known
    os.utime(path, (3e9, 3e9))  # the clock was set back since
    assert memory.local(path).sha256 and memory._known, "else all is read again at each copy"
