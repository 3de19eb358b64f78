"""Every call that a script of the page can make: whatever is sent gets an answer or a sentence; images are found."""

import functools
import json
from inspect import signature
from unittest.mock import Mock

import gradio as gr
import pytest
from draft_helpers import filled, item
from hypothesis import HealthCheck, given, settings, strategies as st
from ui_helpers import write_run

from runs.files import RunError
from runs.pictures import valid_crop
from ui import jobs
from ui.api.server import endpoints
from ui.dataset import bulk, draft, images, imports, subsets
from ui.page import build
from ui.run import actions
from ui.run.view import folder_of

HOSTILE = st.text(st.sampled_from("ab(){}[]*+?|^$\\.,<>&/\n\0é\ud83d💥 1"), max_size=12)
KEYS = (
    "run draft id ids first kind which options do to action from text pattern level before at incident edit"
    " between path name repeats folder query filter page bucket all overwrite job store add remove paths uploads"
    " names drop more word code bytes beside file script draft_id image images settings files preview which"
    " turns turn crop weight png"
)
OWN = "my-run ../.. /proc pause save probe slurm endpoint time"
OTHERS = ("start_draft", "delete_run")  # they would start a training, and delete the run of the next examples
ACTIONS = [*images.READS, *images.CHANGES]
WORDS = [*ACTIONS, *OWN.split()]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(HOSTILE | st.sampled_from(KEYS.split()), inner, max_size=3)
    ),
    max_leaves=5,
)


def act(action: str, sent: object) -> dict:
    """A call of the images' script."""
    return images.image_action({**sent, "action": action} if isinstance(sent, dict) else sent)


def endpoint(function, sent: object) -> dict:
    """A call of the API, with the values by their names."""
    try:
        if not isinstance(sent, dict):
            return {"answer": function(sent)}
        named = {"draft_id": sent.get("draft"), "image": sent.get("id"), "name": sent.get("run"), **sent}
        return {"answer": function(**{key: named[key] for key in signature(function).parameters if key in named})}
    except gr.Error as error:
        return {"ok": False, "error": str(error)}


@pytest.fixture(scope="module")
def calls() -> list:
    """The functions of the whole page and of the API: a new one cannot be forgotten."""
    found = [call for block in build().blocks.values() for call in getattr(block, "server_fns", [])]
    assert "image_action" in {call.__name__ for call in found}
    found += [functools.partial(endpoint, one) for name, one in endpoints().items() if name not in OTHERS]
    return found + [functools.partial(act, name) for name in ACTIONS]


@pytest.fixture
def place(data, monkeypatch) -> str:
    """The id of a draft with two captions, beside a run "my-run". No call starts a process."""
    monkeypatch.setattr(bulk, "PATTERN_S", 0.3)
    for module in (jobs, actions):
        monkeypatch.setattr(module, "start", Mock(side_effect=RunError("nothing is started here")))
    (write_run(data, state="completed", message="") / "training.log").write_text("one\n")
    (data.parent / "secret.txt").write_text("secret")
    monkeypatch.setenv("HOME", str(data.parent))
    monkeypatch.chdir(data.parent)
    mine = draft.new_id()
    filled(mine, "a cat", "a dog")
    return mine


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(
    which=st.integers(0, 999),
    sent=VALUES | st.dictionaries(st.sampled_from(KEYS.split()), VALUES, max_size=6),
    known=st.sets(st.sampled_from(["draft", "run", "id", "paths"])),
)
def test_any_call_is_answered_and_changes_no_other_caption_and_no_other_file(calls, place, data, which, sent, known):
    if isinstance(sent, dict):
        own = {"draft": place, "run": "my-run", "id": f"{0:024x}", "paths": [str(data.parent / "secret.txt")]}
        sent = {**sent, **{key: own[key] for key in known}}
    before = [item.id for item in draft.items(place)]
    answer = calls[which % len(calls)](sent)
    json.dumps(answer, ensure_ascii=False).encode("utf-8")
    if answer.get("ok", True) is not True:
        assert isinstance(answer["error"], str) and len(answer["error"]) > 10, answer
        assert [one.id for one in draft.items(place)] == before, "what is refused changes nothing"
    for one in draft.items(place):
        assert {f"{0:024x}": "a dog", f"{1:024x}": "a cat"}[one.id] not in one.caption, "the other one's caption"
        assert one.weight in range(1, 11) and one.turn in range(4) and valid_crop(one.crop) == one.crop
        assert one.mask is None or (draft.masks_dir(place) / one.mask).is_file()
    assert sorted(path.name for path in data.parent.iterdir()) == ["data", "secret.txt"]


NAMES = ("", ".", "..", "../x", "/etc", ".hidden", "my-run/..", "my-run/../my-run")


@pytest.mark.parametrize("name", [None, [], 3, *NAMES, "gone", "\0", "x" * 5000])
def test_only_the_name_of_a_run_names_its_folder(place, name):
    with pytest.raises(RunError, match=r".{10}"):
        folder_of(name)


def test_images_are_found_by_caption_subset_and_warning(mine, monkeypatch):
    ids = filled(mine, "1girl, red hair, solo", "a girl with Red Hair", "", "solo")
    subsets.move(mine, ids[3:], "extra", 5)
    items = draft.items(mine)

    def found(**query):
        return [ids.index(item.id) for item in images.Query(**query).found(items)]

    assert found() == [0, 1, 2, 3] and found(kind="no_caption") == [2]
    assert found(text="RED hair") == [0, 1]
    assert found(folder="5_extra") == [3] and found(folder="", text="solo") == [0] and found(kind="model") == []
    sent = {"draft": mine, "action": "ids", "between": [ids[3], ids[0]]}
    assert images.image_action({**sent, "query": {"text": "o"}})["ids"] == [ids[0], ids[3]]
    assert images.image_action({**sent, "query": {"text": "o"}, "between": None})["ids"] == [ids[0], ids[3]]
    refused = images.image_action({**sent, "query": {"text": "solo"}, "between": [ids[1], ids[3]]})
    assert "no longer shown" in refused["error"]
    monkeypatch.setattr(images, "PAGE_SIZE", 3)
    assert [images.listing(mine, page)["page"] for page in (-1, 99)] == [0, 1]
    one, other = item("a", 64, 64, warnings=["near"]), item("b", 64, 64, warnings=[])
    assert images.Query(kind="warned").found([other, one]) == [one]


def test_nothing_is_undone_while_images_are_imported(mine, tmp_path, monkeypatch):
    """The next chunk became a new step: what was undone of the import was gone, and it ended as complete."""
    filled(mine, "a cat")
    before = draft.items(mine)
    monkeypatch.setattr(jobs, "start", lambda *_, **__: None)
    imports.start_folder(mine, str(tmp_path))
    for name in ("undo", "redo"):
        assert "Images are being imported" in act(name, {"draft": mine})["error"]
    assert draft.items(mine) is before
    imports.cancel(mine)
    assert act("undo", {"draft": mine})["ok"] and draft.items(mine) != before
