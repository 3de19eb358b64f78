"""Requests that are made in a training, and how they were answered."""

from monitor_helpers import events

from guards import step_requests

ASKED = "sample@2,state@4,save@7"  # the step after which each is requested


def asking(folder, asked=ASKED):
    """The environment of a training in which the requests are made."""
    asks = {"HANGPROOF_INJECT": "request_injectors:ask", "REQUESTS": asked}
    return asks | {"HANGPROOF_RUN": str(folder), "HANGPROOF_HEARTBEAT": str(folder / "beats")}


def answers(folder):
    """{kind: event} of the requests; each has one answer, and none waits."""
    found = events(folder, step_requests.EVENT)
    assert len({event["id"] for event in found}) == len(found) and not step_requests.waiting(folder)
    return {event["request"]: event for event in found}
