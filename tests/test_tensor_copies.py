"""guards/tensor_copies.py: the copy is the state, however many threads make it."""

import threading

import pytest
import torch

from guards import tensor_copies


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that copy."""
    found = set()
    here = tensor_copies.in_this_thread

    def seen(*rest, **more):
        found.add(threading.current_thread().name)
        return here(*rest, **more)

    monkeypatch.setattr(tensor_copies, "in_this_thread", seen)
    return found


def state(count):
    """Tensors of 300 KB of several types, some not contiguous, and some with gradients, as parameters."""
    generator = torch.Generator().manual_seed(count)
    wide = [torch.randn(300, 256, generator=generator) for _ in range(count)]
    kinds = [lambda t: t.requires_grad_(), lambda t: t.t(), lambda t: t.bfloat16(), lambda t: t[:0], lambda t: t.sum()]
    return [kinds[number % len(kinds)](tensor) for number, tensor in enumerate(wide)]


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("count", [1, 7, 41])
def test_the_copy_has_every_value(threads, monkeypatch, cores, count):
    monkeypatch.setattr(tensor_copies, "_cores", lambda: cores)
    sources = state(count)
    targets = [torch.full_like(source, torch.nan, requires_grad=False) for source in sources]
    seconds = tensor_copies.copy(targets, sources, 64 << 20)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert (seconds > 0) == (cores > 1)
    if cores == 1:
        assert threads == {threading.current_thread().name}
    else:
        assert all(name.startswith("hangproof-copy") for name in threads)


def test_no_thread_waits_for_a_small_state(threads, monkeypatch):
    monkeypatch.setattr(tensor_copies, "_cores", lambda: 4)
    target = torch.zeros(3)
    assert tensor_copies.copy([target], [torch.ones(3)], 12) == 0.0
    assert target.tolist() == [1, 1, 1] and threads == {threading.current_thread().name}


def test_two_threads_share_a_large_state(threads, monkeypatch):
    """Each piece waits until another thread copies as well, so one thread alone would not come to an end."""
    monkeypatch.setattr(tensor_copies, "_cores", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    timed = tensor_copies._timed

    def after_the_other(*rest):
        both.wait()
        return timed(*rest)

    monkeypatch.setattr(tensor_copies, "_timed", after_the_other)
    sources = state(2 * tensor_copies.PIECES)
    tensor_copies.copy([torch.empty_like(source) for source in sources], sources, 64 << 20)
    assert len(threads) == 2


def test_an_error_in_a_thread_is_the_callers(monkeypatch):
    monkeypatch.setattr(tensor_copies, "_cores", lambda: 2)
    sources = [torch.ones(4) for _ in range(20)]
    targets = [torch.ones(4) for _ in range(19)] + [torch.ones(5)]
    with pytest.raises(RuntimeError):
        tensor_copies.copy(targets, sources, 64 << 20)
