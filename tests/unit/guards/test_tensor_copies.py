"""guards/tensor_copies.py: the copy is the state, however many threads make it."""

import ctypes
import platform
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from guards import tensor_copies
from guards.tensor_copies import Target


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that copy."""
    found = set()

    def memmove(*rest):
        found.add(threading.current_thread().name)
        return ctypes.memmove(*rest)

    monkeypatch.setattr(tensor_copies, "ctypes", SimpleNamespace(memmove=memmove))
    return found


def state(count):
    """Tensors of several types, most of them of 300 KB: a parameter, some that are not one range of memory, an empty one, a number."""
    generator = torch.Generator().manual_seed(count)
    wide = [torch.randn(300, 256, generator=generator) for _ in range(count)]
    kinds = [
        lambda t: t.requires_grad_(), lambda t: t.t(), lambda t: t.bfloat16(), lambda t: t[:0], lambda t: t.sum(), lambda t: t[::2],
        torch._neg_view, lambda t: torch.view_as_complex(t.view(-1, 2)).conj(),
    ]  # fmt: skip
    return [kinds[number % len(kinds)](tensor) for number, tensor in enumerate(wide)]


def targets(sources):
    """Room for them, of which the last bytes are there to see that nobody writes behind a tensor's end."""
    blocks = [torch.full((source.nbytes + 64,), 0x55, dtype=torch.uint8) for source in sources]
    return blocks, [block[:-64].view(s.dtype).view(s.shape) for block, s in zip(blocks, sources, strict=True)]


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("count", [1, 17, 200])
def test_the_copy_has_every_value_and_nothing_else(threads, monkeypatch, cores, count):
    monkeypatch.setattr(tensor_copies, "_cores", lambda: cores)
    sources = state(count)
    blocks, places = targets(sources)
    tensor_copies.copy(Target.of(places), sources)
    assert all(torch.equal(place, source.detach()) for place, source in zip(places, sources, strict=True))
    assert all(block[-64:].eq(0x55).all() for block in blocks)
    if cores == 1 or count == 1:
        assert threads == {threading.current_thread().name}


def test_several_threads_share_a_large_state(threads, monkeypatch):
    """Each waits for the other with its first tensor, so one alone would not come to an end."""
    monkeypatch.setattr(tensor_copies, "_cores", lambda: 2)
    both, here = threading.Barrier(2, timeout=30), threading.local()
    memmove = tensor_copies.ctypes.memmove

    def after_the_other(*rest):
        if not hasattr(here, "begun"):
            here.begun = both.wait()
        return memmove(*rest)

    tensor_copies.ctypes.memmove = after_the_other
    sources = [torch.randn(300, 256) for _ in range(4 * tensor_copies.PIECE)]
    tensor_copies.copy(Target.of([torch.empty_like(source) for source in sources]), sources)
    assert len(threads) == 2


def test_what_a_signal_interrupts_has_ended_when_the_caller_goes_on(threads, monkeypatch):
    """A handler that raises in the thread that calls: afterwards nobody writes to the memory, which may be freed then."""
    monkeypatch.setattr(tensor_copies, "_cores", lambda: 2)
    caller, running = threading.current_thread(), []
    memmove = tensor_copies.ctypes.memmove
    both = threading.Barrier(2, timeout=30)

    def interrupted(*rest):
        if not running:
            both.wait()
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        running.append(True)
        threading.Event().wait(0.05)
        memmove(*rest)
        running.append(False)

    tensor_copies.ctypes.memmove = interrupted
    sources = [torch.randn(300, 256) for _ in range(40 * tensor_copies.PIECE)]
    with pytest.raises(KeyboardInterrupt):
        tensor_copies.copy(Target.of([torch.empty_like(source) for source in sources]), sources)
    seen = len(running)
    assert seen == 2 * tensor_copies.PIECE and not running[-1], "the other thread has completed its piece"
    threading.Event().wait(0.2)
    assert len(running) == seen


LOADER = Path("/lib64/ld-linux-x86-64.so.2")


@pytest.mark.skipif(not LOADER.exists(), reason=f"no glibc on x86-64: {LOADER} is missing")
@pytest.mark.parametrize("known", ["", "glibc.malloc.tcache_count=3"])
def test_glibc_knows_the_variable_for_fast_copies(known):
    """The loader lists the values with which a process starts."""
    given = {tensor_copies.TUNABLES: known} if known else {}
    wanted = tensor_copies.environment(given)
    listed = subprocess.run(
        [LOADER, "--list-tunables"], env=given | wanted, capture_output=True, text=True, timeout=30, check=False
    ).stdout
    values = dict(re.findall(r"^(\S+): (\S+)", listed, re.MULTILINE))
    if tensor_copies.NON_TEMPORAL not in values:
        pytest.skip(f"this glibc does not list its tunables: {platform.libc_ver()}")
    assert int(values[tensor_copies.NON_TEMPORAL], 0) == tensor_copies.NON_TEMPORAL_BYTES
    assert not known or int(values["glibc.malloc.tcache_count"], 0) == 3
