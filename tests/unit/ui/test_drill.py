"""What the tab Doctor says of the last hang drill, and where its link leads."""

import pytest
from ui_helpers import write_run

from ui import doctor_page, jobs

RUN = {"run": "demo"}
# state of the command, its answer, whether the run is there → whether it is busy, what the markup has
LOOKS = [
    ("running", None, False, True, "Starting (1 s)…"),
    ("done", RUN, True, False, '<a class="hp-link" href="?run=demo">'),
    ("done", RUN, False, False, ""),
    ("failed", None, False, False, "The drill did not start: no space is left"),
    ("cancelled", None, False, False, ""),
]


@pytest.mark.parametrize(("state", "answer", "there", "busy", "expected"), LOOKS)
def test_the_last_drill_is_shown_with_a_link_to_its_run(tmp_path, monkeypatch, state, answer, there, busy, expected):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    assert doctor_page.look_at_drill() == (False, "")
    if there:
        write_run(tmp_path, "demo")
    monkeypatch.setattr(jobs, "read", lambda folder, name: jobs.Job(name, state, 1.0))
    monkeypatch.setattr(jobs, "output", lambda folder, name: ([], answer, "launch drill: no space is left"))
    found, markup = doctor_page.look_at_drill()
    assert found is busy
    assert expected in markup if expected else markup == ""
