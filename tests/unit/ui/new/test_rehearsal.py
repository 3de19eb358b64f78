"""The last rehearsal of a draft as the page shows it."""

import json

import pytest

from launch import rehearse
from ui.new import form, rehearsal, run_starts

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_rehearsal_is_shown_as_text_and_out_of_date_once_the_settings_change(mine):
    form.save(mine, {"name": "x", "model": "tiny-flux"}, typed=True)
    (folder := run_starts.rehearsal_folder(mine)).mkdir()
    stages = [{"key": "load", "title": "Load", "state": rehearse.FAILED, "text": "<b>"}]
    problem = {"stage": "Load", "title": "No memory.", "text": "<i>", "change": "Lower it.", "log": ""}
    known = {"state": rehearse.FAILED, "digest": rehearse.digest(rehearsal._spec_now(mine)), "stages": stages}
    (folder / rehearse.FILE).write_text(json.dumps({**known, "problem": problem}))
    shown = rehearsal.look(mine)[1]
    assert "The rehearsal failed at “Load”: No memory.<" in shown and "<b>" not in shown and "<i>" not in shown
    form.save(mine, {"rank": 8}, typed=True)
    assert "No memory. Out of date: the settings have changed since." in rehearsal.look(mine)[1]
