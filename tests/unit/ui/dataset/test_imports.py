"""What is stored of an import that has ended."""

import json

from ui.dataset import imports


def test_the_result_of_an_import_is_shown_once_it_no_longer_waits(mine):
    path = imports.place(mine) / "1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"kind": "folder", "name": "写真", "attempts": 1}), encoding="utf-8")
    imports.finish(path, "done", 3, ["one file was no image"])
    assert imports.status(mine) == {
        "waiting": 0,
        "now": None,
        "finished": [{"id": "1", "name": "写真", "state": "done", "added": 3, "messages": ["one file was no image"]}],
    }
