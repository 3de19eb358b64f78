"""A call from a draft's scripts is answered: with what it returns, or with a sentence."""

from runs.files import RunError
from ui.dataset import draft
from ui.dataset.calls import Text, answer


def act(draft_id: str, number: int, text: Text = "") -> dict:
    if number < 0:
        raise RunError(draft.REMOVED if number == -1 else "too small")
    return {"sum": number + 1, "text": text}


def test_a_call_gets_the_values_that_it_names_of_the_types_that_they_have(mine):
    sent = {"draft": mine, "number": 4, "text": "half \ud83d", "unknown": 1}
    found = answer(act, sent, lambda draft_id, values: {"of": draft_id, "sum": values["sum"]})
    assert found == {"ok": True, "sum": 5, "text": found["text"], "list": {"of": mine, "sum": 5}}
    assert found["text"].encode() and found["text"].startswith("half ")


def test_what_cannot_be_done_is_a_sentence(mine):
    for wrong in (None, [], {}, {"draft": "../x", "number": 1}, {"draft": mine}, {"draft": mine, "number": "4"}):
        assert answer(act, wrong)["error"] == draft.OUT_OF_DATE, wrong
    assert answer(act, {"draft": mine, "number": -2}) == {"ok": False, "error": "too small", "removed": False}
    assert answer(act, {"draft": mine, "number": -1})["removed"]
