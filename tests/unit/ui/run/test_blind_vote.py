"""The blind vote: votes are stored one by one and never lost, and the one that won most of them is picked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ui_helpers import PROJECT

from runs.files import RunError
from runs.results import Lora, Sample
from ui.run import blind_vote as bv
from ui.run.snapshots import Evolution, Snapshot


def run_of(steps, prompts=3, loras=None) -> Evolution:
    """A run with samples at some steps and LoRAs at `loras` of them (None: at all)."""
    found = []
    for step in steps:
        samples = tuple(Sample(Path(f"s_{step}_{n}.png"), "step", step, n) for n in range(prompts))
        has = step and (loras is None or step in loras)
        lora = Lora(Path(f"x-step{step:08}.safetensors"), 1, False, step, None) if has else None
        found.append(Snapshot(step, None, None, None, None, lora, samples))
    return Evolution(snapshots=tuple(found))


def vote(folder, found, like, count: int) -> None:
    """Vote `count` times as somebody who likes `like(step)` best."""
    for _ in range(count):
        pair = bv.next_pair(found, bv.votes(folder))
        gap = like(pair.left) - like(pair.right)
        choice = "equal" if not gap else "left" if gap > 0 else "right"
        bv.vote(folder, pair, choice)


def test_the_lora_that_wins_most_is_picked_after_enough_votes_and_a_mark_counts_more(tmp_path):
    found = run_of(range(0, 500, 100))
    vote(tmp_path, found, lambda step: -abs(step - 300), bv.ENOUGH - 1)
    assert bv.picked(tmp_path) is None
    vote(tmp_path, found, lambda step: -abs(step - 300), 6)
    assert bv.picked(tmp_path) == 300
    rows = bv.wins(bv.votes(tmp_path))
    assert sum(won for _, won, _ in rows) == bv.ENOUGH + 5 and sum(seen for _, _, seen in rows) == 2 * (bv.ENOUGH + 5)
    assert max(seen for _, _, seen in rows) - min(seen for _, _, seen in rows) <= 1  # all take part alike
    bv.mark(tmp_path, 100)
    assert bv.picked(tmp_path) == 100
    bv.mark(tmp_path, None)
    assert bv.picked(tmp_path) == 300


def test_sides_and_prompts_change_at_most_eight_take_part_and_less_than_two_give_no_pair():
    found = run_of(range(100, 5100, 100))
    pairs = [bv.next_pair(found, []) for _ in range(200)]
    steps = {step for one in pairs for step in (one.left, one.right)}
    assert len(steps) == bv.MOST and (min(steps), max(steps)) == (100, 5000)
    assert {one.left < one.right for one in pairs} == {True, False} and {one.prompt for one in pairs} == {0, 1, 2}

    for found in (run_of([]), run_of([0, 100]), run_of([100, 200], loras=[200]), run_of([100, 200], prompts=0)):
        assert bv.next_pair(found, []) is None


def test_lines_that_are_torn_or_foreign_cost_no_other(tmp_path):
    assert bv.votes(tmp_path) == [] and bv.picked(tmp_path) is None
    pair = bv.Pair(0, 100, 200)
    line = {"kind": "vote", "choice": "left", "prompt": 0, "left": 100, "right": 200}
    bv.vote(tmp_path, pair, "left")
    with (tmp_path / bv.FILE).open("ab") as file:
        file.write(b'\xff[]\n{"kind": "vote"}\n')
        file.write((json.dumps({**line, "choice": "both"}) + "\n" + json.dumps({**line, "left": "x"}) + "\n").encode())
        file.write(b'{"kind": "vote", "choi')  # a power cut
    bv.vote(tmp_path, pair, "right")
    assert [choice for _, choice in bv.votes(tmp_path)] == ["left", "right"]
    (tmp_path / bv.FILE).unlink()
    (tmp_path / bv.FILE).mkdir()
    assert bv.votes(tmp_path) == []
    with pytest.raises(RunError, match="store the vote"):
        bv.vote(tmp_path, pair, "left")


def test_processes_that_vote_at_once_lose_nothing(tmp_path):
    code = (
        "import sys, pathlib; from ui.run import blind_vote as bv\n"
        "for n in range(50): bv.vote(pathlib.Path(sys.argv[1]), bv.Pair(n, 1, 2), 'left')"
    )
    voters = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT) for _ in range(3)]
    assert [one.wait(60) for one in voters] == [0, 0, 0]
    assert len(bv.votes(tmp_path)) == 150
