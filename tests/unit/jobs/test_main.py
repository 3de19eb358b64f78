"""`python -m jobs`: the runs of a sweep are one entry of the queue; a word that is missing is wrong usage."""

import json

import pytest

from jobs import __main__ as commands, queue


@pytest.mark.parametrize("words", [[], ["--no-queue"]])
def test_the_command_queues_the_sweep_unless_it_shall_not(base, monkeypatch, capsys, words):
    monkeypatch.setattr(queue, "ensure_worker", lambda: True)
    assert commands.main(["sweep", "cat", "--set", "rank=8,16", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sweep"] == "cat-sweep"
    assert [entry.run for entry in queue.read().entries] == ([] if words else ["cat-sweep"])


def test_runs_of_a_sweep_that_the_queue_does_not_take_are_named(base, monkeypatch, capsys):
    monkeypatch.setattr(queue, "MOST", 0)
    assert commands.main(["sweep", "cat", "--set", "rank=8,16"]) == 1
    said = capsys.readouterr().err
    assert "2 runs are made, but not in the queue: the queue has 0 entries already" in said
    assert said.endswith("Add each on its page, or with `python -m jobs queue add RUN`: cat-r8, cat-r16\n")


@pytest.mark.parametrize("words, missing", [(["add"], "name the run"), (["move", "cat"], "name the position")])
def test_a_missing_word_is_wrong_usage(capsys, words, missing):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["queue", *words])
    assert missing in capsys.readouterr().err
