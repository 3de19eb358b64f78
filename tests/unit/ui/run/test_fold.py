"""The parts of the page that are made when they are opened."""

from ui import page


def test_parts_opened_together_are_drawn_one_after_the_other():
    drawn = [event for event in page.build().fns.values() if event.renderable]
    assert len(drawn) > 10
    assert {(event.concurrency_limit, event.concurrency_id) for event in drawn} == {(1, "drawn parts")}
