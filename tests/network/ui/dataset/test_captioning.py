"""What is stored of a caption job of a draft, whose captions are kept, and what the calls of the browser answer."""

import json

import psutil
import pytest
from caption_server import answering
from draft_helpers import captions, drop, item_of, photo, set_caption
from ui_page import until

from captions.work import Picture
from runs.files import RunError
from ui import jobs
from ui.dataset import captioning, draft


@pytest.fixture
def draft_id(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    found = draft.new_id()
    drop(found, *[photo(tmp_path / "in" / f"{number}.png", seed=number) for number in range(5)])
    (tmp_path / "in" / "1.txt").write_text("from a file")
    drop(found, tmp_path / "in" / "1.txt")
    set_caption(found, "0.png", "mine")
    ids = [item_of(found, "2.png").id]
    draft.change_images(found, ids, lambda _, entry: draft.captioned(entry, "from a model", "model"), "x")
    return found


def options(url: str, **more) -> dict:
    return {"engine": "endpoint", "url": url, "model": "m", **more}


def wait(draft_id: str) -> dict:
    until(lambda: captioning.status(draft_id)["state"] != "running", "the job has ended")
    return captioning.status(draft_id)


@pytest.mark.parametrize(
    ("which", "overwrite", "replaced"),
    [("empty", False, "34"), ("model", False, "234"), ("all", False, "234"), ("all", True, "01234")],
)
def test_which_captions_are_replaced(draft_id, which, overwrite, replaced):
    before = captions(draft_id)
    captioning.begin(draft_id, options("http://h/v1"), which, overwrite=overwrite)
    work = captioning.DraftWork(draft_id)
    assert [picture.name[0] for picture in work.missing()] == list(replaced)
    for picture in work.missing():
        work.store(picture, f"new {picture.name}")
    assert work.counts() == (len(replaced), len(replaced)) and work.missing() == []
    after = captions(draft_id)
    assert {name[0] for name in after if after[name] != before[name]} == set(replaced)
    assert draft.undo(draft_id) == "Undone: captions written by a model."
    assert captions(draft_id) == before, "one step"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_caption_that_was_typed_meanwhile_is_kept(draft_id, overwrite):
    captioning.begin(draft_id, options("http://h/v1"), "all", overwrite=overwrite)
    work = captioning.DraftWork(draft_id)
    set_caption(draft_id, "3.png", "typed meanwhile")
    draft.remove(draft_id, [item_of(draft_id, "4.png").id])
    for picture in [*work.missing(), Picture("0" * 24, "gone", work.missing()[0].path)][:-1]:
        work.store(picture, "by the model")
    after = captions(draft_id)
    assert after["3.png"] == "typed meanwhile" and after["2.png"] == "by the model" and "4.png" not in after


def test_a_trigger_word_alone_counts_as_no_caption(draft_id):
    draft.save_fields(draft_id, {"trigger": "ohwx"})
    draft.insert_trigger(draft_id)
    captioning.begin(draft_id, options("http://h/v1"))
    assert [picture.name for picture in captioning.DraftWork(draft_id).missing()] == ["3.png", "4.png"]


@pytest.mark.slow
def test_a_killed_job_is_shown_as_interrupted_and_continues(draft_id):
    with answering() as server:
        # Two answers, and none to the third question while the job is killed.
        server.answer = lambda number, question: f"a slow picture {number}" if number <= 2 else None
        assert captioning.start(draft_id, options(server.url), "all", None, True) == 5
        with pytest.raises(RunError, match="being written already"):
            captioning.start(draft_id, options(server.url), "all", None, True)
        until(lambda: captioning.status(draft_id)["done"] >= 2, "two captions are written")
        values = json.loads((draft.folder(draft_id) / jobs.FOLDER / f"{captioning.JOB}.json").read_text())
        keeper = psutil.Process(values["pid"])
        for process in [*keeper.children(recursive=True), keeper]:
            process.kill()
        now = wait(draft_id)
        assert (now["state"], now["done"], now["total"]) == ("lost", 2, 5)
        kept = {name: text for name, text in captions(draft_id).items() if text.startswith("a slow picture")}
        assert len(kept) == now["done"]
        server.answer = lambda number, question: "after"
        captioning.resume(draft_id)
        now = wait(draft_id)
        assert (now["state"], now["before"], now["done"], now["error"]) == ("done", 2, 5, "")
        after = captions(draft_id)
        assert all(after[name] == text for name, text in kept.items())
        assert sorted(after.values()) == sorted([*kept.values(), *["after"] * (5 - len(kept))])


def test_a_job_that_fails_says_why(draft_id):
    with answering() as server:
        server.answer = lambda number, question: (404, b'{"error": "no model m"}', {})
        captioning.start(draft_id, options(server.url))
        now = wait(draft_id)
    assert now["state"] == "failed" and "404: no model m" in now["error"] and len(now["failures"]) == now["failed"] == 1
    assert captions(draft_id)["3.png"] == ""


REFUSED = {
    "no": [{}],
    "florence": [{"task": "poem"}, {"model": "/"}, {"prefix": "x" * 501}],
    "tagger": [{"general": "0.3"}, {"general": 0}, {"character": 1.5}, {"model": "no-such"}],
}
ENDPOINT = [{"url": 7}, {"rewrite": True}, {"folder": "/"}, {"model": "a\nb"}, {"key_variable": "not a name"}]
CASES = [{"engine": engine, **more} for engine, cases in REFUSED.items() for more in cases]
CASES += [options("http://h/v1") | more for more in ENDPOINT]


@pytest.mark.parametrize("given_", [{}, [], None, *CASES])
def test_options_that_the_command_does_not_have_or_that_cannot_work_are_refused_before_the_job(draft_id, given_):
    with pytest.raises(RunError, match="."):
        captioning.start(draft_id, given_)
    assert captioning.stored(draft_id) is None and captioning.status(draft_id)["state"] == ""
