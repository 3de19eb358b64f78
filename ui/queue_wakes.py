"""Gradio's queue, woken by its events instead of a clock.

Its two loops (`Queue.start_processing` and `start_progress_updates`, gradio/queueing.py) look for work every
millisecond and every ten, which takes a tenth of a core for a page that nobody uses. Longer pauses delay every answer.
So the loops run as they are, and only their `asyncio.sleep` is another one: with nothing to do, it ends when an event
is pushed.
"""

import asyncio
import types
from collections.abc import Callable, Coroutine
from typing import Any

LOOPS = ("start_processing", "start_progress_updates")
NAMES = {"asyncio", "sleep"}  # what a loop must use, so that its pauses can be replaced
IDLE_S = 2.0  # a loop without work looks again after so long even if nothing was pushed
BUSY_S = 0.01  # while an event waits for another one to end


def install(blocks: Any) -> bool:
    """Wake the queue of `blocks` by its events. Returns False, and changes nothing, where Gradio's loops are not as expected."""
    queue = blocks._queue
    kind = type(queue)
    if not all(_replaceable(getattr(kind, name, None)) for name in LOOPS) or not callable(getattr(queue, "push", None)):
        return False
    wakes = [asyncio.Event() for _ in LOOPS]
    push = queue.push

    async def push_and_wake(*args: Any, **kwargs: Any) -> Any:
        try:
            return await push(*args, **kwargs)
        finally:
            for wake in wakes:
                wake.set()

    queue.push = push_and_wake
    for name, wake in zip(LOOPS, wakes, strict=True):
        setattr(queue, name, types.MethodType(_with_pause(getattr(kind, name), _pause(queue, wake)), queue))
    return True


def _replaceable(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and set(code.co_names) >= NAMES and not code.co_freevars


def _pause(queue: Any, wake: asyncio.Event) -> Callable[[float], Coroutine[Any, Any, None]]:
    async def pause(seconds: float) -> None:
        if len(queue) or any(job is not None for job in queue.active_jobs):
            await asyncio.sleep(max(seconds, BUSY_S))
            return
        try:
            await asyncio.wait_for(wake.wait(), IDLE_S)
        except TimeoutError:
            return
        wake.clear()

    return pause


def _with_pause(function: Any, pause: Callable[[float], Coroutine[Any, Any, None]]) -> types.FunctionType:
    """The same function, whose `asyncio.sleep` is `pause`."""
    module = types.ModuleType("asyncio")
    module.__dict__.update({**asyncio.__dict__, "sleep": pause})
    names = {**function.__globals__, "asyncio": module}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
