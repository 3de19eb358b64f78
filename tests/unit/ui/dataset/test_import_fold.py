"""The imports of a draft as the page shows them."""

from draft_helpers import drawn

from ui.dataset import import_fold
from ui.dataset.import_fold import shown


def test_the_import_that_runs_and_the_ends_of_others_are_shown_as_text():
    now = {"done": 1000, "total": 2000, "phase": "adding", "name": "<far>"}
    ended = {"state": "failed", "name": "old.zip", "added": 1, "messages": ["a.png: <b>"]}
    text = shown({"now": now, "waiting": 2, "finished": [ended]})
    assert "Adding images: 1,000 of 2,000 files · &lt;far&gt; · 1 import after it" in text
    assert 'max="2000" value="1000"' in text and "<far>" not in text and "<b>" not in text
    assert "old.zip: not imported completely; 1 image added." in text and "a.png: &lt;b&gt;" in text
    finished = [{**ended, "state": "done", "messages": []}]
    text = shown({"now": {**now, "phase": "reading", "total": 0}, "waiting": 1, "finished": finished})
    assert "Reading the folder: · &lt;far&gt;<" in text and "value=" not in text and "<ul>" not in text


def test_a_typed_folder_is_imported_into_the_draft(mine, tmp_path, monkeypatch):
    events, _ = drawn(import_fold.draw, mine)
    begun = []
    monkeypatch.setattr(import_fold.imports, "start_folder", lambda *given: begun.append(given))
    events["begin"](str(tmp_path))
    assert begun == [(mine, str(tmp_path))]
