"""A double of a provider of machines: it answers in turn and records the requests."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from loopback import Request, answering

KEY = "rpa_0123456789SECRET"


@dataclass
class Provider:
    """A running double. requests: (method, path, the body's value, headers)."""

    url: str = ""
    requests: list[tuple[str, str, object, dict[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def provider(*answers: tuple[int, object] | tuple[int, object, dict[str, str]]) -> Iterator[Provider]:
    """A running Provider with these answers; it repeats the last one. Status 0: no answer at all."""
    left, double = list(answers), Provider()

    def answer(request: Request):
        double.requests.append((request.method, request.path, request.json, dict(request.headers)))
        found = left.pop(0) if len(left) > 1 else left[0]
        return found if found[0] else None

    with answering(answer) as server:
        double.url = server.url
        yield double
