"""What the page says of a draft's settings: the plan, the button with the proposed length, the notes on the model."""

import json

import pytest
from configure_helpers import values
from draft_helpers import add_photos

from ui.dataset import draft
from ui.new import form, summary

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_the_form_is_parsed_once_a_change(mine, monkeypatch, tmp_path):
    add_photos(mine, tmp_path, 2)
    calls = []
    make = form.make
    monkeypatch.setattr(form, "make", lambda fields: calls.append(1) or make(fields))
    draft.save_fields(mine, values())
    said = summary.save_settings(mine, {})["said"]
    assert len(calls) == 1 and "320 steps" in said[0]
    assert json.dumps(said), "a browser gets all of it"
