"""Cache files on real disks, FIFOs and a stalled mount: read in time and verified, or refused by name."""

import errno
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import children
import numpy
import pytest

from guards import npz


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "a_flux.npz"
    npz.save(path, latents=numpy.arange(4000, dtype="float32").reshape(40, 100), size=numpy.array([64, 64]), flag=True)
    return path


def test_what_is_saved_is_loaded_as_numpy_reads_it_and_a_key_that_is_not_there_is_named_with_those_that_are(cache):
    theirs = numpy.load(cache)
    with npz.Archive(cache) as archive:
        names = ["latents", "size", "flag"]
        assert list(archive) == archive.files == theirs.files == names and len(archive) == 3
        assert "size" in archive and "nothing" not in archive
        with pytest.raises(KeyError, match=r"a_flux\.npz: no 'nothing'; it holds latents, size, flag"):
            archive["nothing"]
    assert archive._zip.fp is None, "the file is closed"
    ours = npz.load(cache)
    assert list(ours) == theirs.files
    for key in theirs.files:
        numpy.testing.assert_array_equal(ours[key], theirs[key], strict=True)


def test_a_save_adds_the_ending_as_numpy_does_and_one_that_is_killed_in_the_middle_leaves_the_old_file(tmp_path):
    path = npz.save(tmp_path / "c", x=numpy.zeros(3))
    assert list(tmp_path.iterdir()) == [path] == [tmp_path / "c.npz"]
    script = (
        "import os, sys, numpy; from guards import npz\n"
        "real = numpy.savez\n"
        "def savez(file, **arrays): file.write(b'PK half'); file.flush(); os.kill(os.getpid(), 9)\n"
        "numpy.savez = savez\n"
        "npz.save(sys.argv[1], x=numpy.ones(3))"
    )
    ended = children.run(script, path)
    assert ended.returncode == -signal.SIGKILL
    numpy.testing.assert_array_equal(npz.load(path)["x"], numpy.zeros(3))


def test_a_corrupt_member_is_found_behind_an_intact_directory_and_a_second_reader_says_so(cache, monkeypatch):
    """It is closed before it is renamed: Windows renames no open file, and then the damage would fail each start."""
    replace, closed = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *paths: closed.append(one._zip.fp is None) or replace(*paths))
    data = bytearray(cache.read_bytes())
    middle = len(data) // 2  # of the largest member
    data[middle : middle + 8] = bytes(255 - b for b in data[middle : middle + 8])
    cache.write_bytes(data)
    assert "latents" in numpy.load(cache)  # the directory says all is well
    with npz.Archive(cache) as one, npz.Archive(cache) as two:
        numpy.testing.assert_array_equal(one["size"], [64, 64])  # this member is
        with pytest.raises(ValueError, match=r"damaged \('latents'.*renamed"):
            one["latents"]
        with pytest.raises(ValueError, match="another worker has renamed it"):
            two["latents"]
    assert not cache.exists() and closed == [True, True]


def test_every_single_flipped_byte_is_harmless_or_damage_and_a_truncated_file_is_set_aside(tmp_path):
    """No byte may be wrong without an error or the right values; and only builtin errors come out. One makes the
    directory begin before the file's first byte: that is no error of the disk."""
    path = npz.save(tmp_path / "small.npz", x=numpy.arange(6, dtype="float32"))
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(len(data))]
    for content in [*flipped, *(data[:length] for length in range(len(data)))]:
        path.write_bytes(content)
        try:
            loaded = npz.load(path)
        except ValueError as error:
            assert type(error).__module__ == "builtins" and not path.exists()
            assert pickle.loads(pickle.dumps(error)).args == error.args
            assert "small.npz is damaged" in str(error) and "renamed to small.npz.corrupt" in str(error)
        else:
            assert content in flipped and (list(loaded) != ["x"] or loaded["x"].tolist() == [0, 1, 2, 3, 4, 5])


def test_a_machine_without_memory_or_threads_damages_no_cache(cache, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=r"'latents' of .*a_flux\.npz: Unable"):
        patch.setattr(numpy.lib.format, "read_array", Mock(side_effect=MemoryError("Unable to allocate 3.64 TiB")))
        npz.load(cache)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(npz.load, cache).result()
    assert cache.exists()


def test_a_disk_that_cannot_be_read_damages_no_cache(cache, monkeypatch):
    monkeypatch.setattr("zipfile._EndRecData", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        npz.load(cache)
    assert cache.is_file()


def test_a_fifo_times_out_on_the_main_thread_and_on_another_and_the_file_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "0.3")
    path = tmp_path / "f.npz"
    os.mkfifo(path)
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the directory of .*f\.npz"):
        npz.load(path)
    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=r"f\.npz") as caught:
        pool.submit(npz.load, path).result(60)
    assert caught.type is TimeoutError and path.exists()


def test_a_read_that_no_signal_can_interrupt_kills_the_process(tmp_path):
    """SIGALRM has no effect, as on a stalled mount: it is blocked. The deadline behind it kills the process."""
    os.mkfifo(tmp_path / "x.npz")
    script = (
        "import signal; from guards import limits, npz\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "limits.TABLE['alarm_backstop_s'] = limits.Limit(1, 'SIGALRM')\n"
        f"npz.load({str(tmp_path / 'x.npz')!r})"
    )
    ended = children.run(script, HANGPROOF_NPZ_TIMEOUT_S=0.5)
    assert ended.returncode == 75, ended.stderr
    assert "waited 1.5 s for " in ended.stderr and "x.npz (not interruptible)" in ended.stderr
