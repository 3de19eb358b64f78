"""The blind vote: votes are stored one by one and never lost, and they name the LoRA that is liked best."""

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs.evolution import Evolution, Lora, Sample, Snapshot
from runs.files import RunError
from ui.run import blind_vote as bv

ROOT = Path(__file__).resolve().parents[4]


def run_of(steps, prompts=3, loras=None) -> Evolution:
    """A run with samples at some steps and LoRAs at `loras` of them (None: at all)."""
    found = []
    for step in steps:
        samples = tuple(Sample(Path(f"s_{step}_{n}.png"), "step", step, n) for n in range(prompts))
        has = step and (loras is None or step in loras)
        lora = Lora(Path(f"x-step{step:08}.safetensors"), 1, False, step, None) if has else None
        found.append(Snapshot(step, None, None, None, None, lora, samples))
    return Evolution(snapshots=tuple(found))


def vote(folder, found, like, rng, count=1) -> None:
    """Vote `count` times as somebody who likes `like(step)` best, with a taste that wavers."""
    for _ in range(count):
        pair = bv.next_pair(found, bv.read(folder), rng)
        gap = like(pair.left) - like(pair.right) + rng.gauss(0, 0.5)
        bv.cast(folder, pair.id, "equal" if abs(gap) < 0.1 else "left" if gap > 0 else "right", found)


# The pairs -----------------------------------------------------------------------------------------------------------


def test_each_lora_is_seen_twice_first_and_the_sides_are_shuffled(tmp_path):
    found, rng = run_of(range(0, 700, 100)), random.Random(1)
    vote(tmp_path, found, lambda step: step, rng, 6)
    votes = bv.read(tmp_path).votes
    seen = [step for one in votes for step in (one.pair.left, one.pair.right)]
    assert set(seen) == {100, 200, 300, 400, 500, 600} and max(seen.count(step) for step in seen) == 2
    vote(tmp_path, found, lambda step: step, rng, 30)
    later = bv.read(tmp_path).votes
    assert {one.pair.left < one.pair.right for one in later} == {True, False}
    assert {one.pair.prompt for one in later} == {0, 1, 2}


def test_at_most_eight_take_part_and_those_with_votes_stay(tmp_path):
    found = run_of(range(100, 5100, 100))
    steps = bv.candidates(found, [])
    assert len(steps) == 8 and steps[0] == 100 and steps[-1] == 5000
    vote(tmp_path, found, lambda step: step, random.Random(1), 8)
    more = run_of(range(100, 9100, 100))
    assert set(bv.candidates(more, bv.read(tmp_path).votes)) == set(steps)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (run_of([]), "none has"),
        (run_of([0, 100]), "only one has"),
        (run_of([100, 200], loras=[200]), "only one has"),
        (run_of([100, 200], prompts=0), "none has"),
    ],
)
def test_too_few_loras_are_explained(found, text):
    with pytest.raises(RunError, match=text) as error:
        bv.next_pair(found, bv.Ballot())
    assert "to the same number" in str(error.value)


def test_the_id_does_not_show_the_steps_and_survives_the_server():
    pair = bv.next_pair(run_of([123, 456]), bv.Ballot())
    assert "123" not in pair.id and "456" not in pair.id
    assert bv.pair_of(pair.id) == pair
    assert bv.next_pair(run_of([123, 456]), bv.Ballot()).id != pair.id


@given(st.text(max_size=60) | st.none() | st.integers() | st.binary(max_size=20))
def test_any_other_id_is_refused(text):
    with pytest.raises(RunError, match="not a pair"):
        bv.pair_of(text)


# The file ------------------------------------------------------------------------------------------------------------


def test_a_vote_counts_once_and_only_for_what_is_there(tmp_path):
    found = run_of([100, 200])
    pair = bv.next_pair(found, bv.Ballot())
    for _ in range(3):
        bv.cast(tmp_path, pair.id, "left", found)  # a request that was sent again
    assert len(bv.read(tmp_path).votes) == 1
    with pytest.raises(RunError, match="is gone"):
        bv.cast(tmp_path, pair.id, "left", run_of([100]))
    with pytest.raises(RunError, match="use one of left, right, equal"):
        bv.cast(tmp_path, pair.id, "both", found)
    with pytest.raises(RunError, match="There is no LoRA of step 150; use one of 100, 200"):
        bv.pick(tmp_path, 150, found)
    bv.pick(tmp_path, 200, found)
    assert bv.picked(tmp_path, found) == 200
    bv.pick(tmp_path, None, found)
    assert bv.picked(tmp_path, found) is None
    bv.reset(tmp_path)
    assert bv.read(tmp_path) == bv.Ballot()


def test_a_line_that_a_power_cut_tore_costs_no_other(tmp_path):
    found = run_of([100, 200])
    bv.cast(tmp_path, bv.next_pair(found, bv.Ballot()).id, "left", found)
    with (tmp_path / bv.FILE).open("ab") as file:
        file.write(b'{"kind": "vote", "id": "abc')
    bv.cast(tmp_path, bv.next_pair(found, bv.Ballot()).id, "right", found)
    assert [one.choice for one in bv.read(tmp_path).votes] == ["left", "right"]


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.integers(), max_size=2)
)
LINES = st.binary(max_size=30) | st.builds(
    lambda kind, pair, choice, step: json.dumps({"kind": kind, "id": pair, "choice": choice, "step": step}).encode(),
    st.sampled_from(["vote", "pick", "reset"]) | VALUES,
    VALUES | st.builds(bv._id, st.integers(0, 3), st.integers(0, 500), st.integers(0, 500)),
    st.sampled_from(bv.CHOICES) | VALUES,
    VALUES,
)


@given(st.lists(LINES, max_size=12))
@settings(max_examples=50)
def test_any_file_is_read_and_judged(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("votes")
    (folder / bv.FILE).write_bytes(b"\n".join(lines))
    found = run_of([100, 200, 300])
    ballot = bv.read(folder)
    steps = bv.candidates(found, ballot.votes)
    votes = bv.counted(steps, ballot.votes)
    rows = bv.standings(steps, votes)
    assert bv.verdict(rows, votes) and abs(sum(one.chance for one in rows) - 1) < 1e-6
    bv.next_pair(found, ballot)
    bv.picked(folder, found)


def test_two_browsers_lose_no_vote(tmp_path):
    found, errors = run_of([100, 200, 300]), []

    def browser(seed):
        try:
            vote(tmp_path, found, lambda step: step, random.Random(seed), 40)
        except Exception as error:  # noqa: BLE001 - a thread's error must fail the test
            errors.append(error)

    threads = [threading.Thread(target=browser, args=(seed,)) for seed in (1, 2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert errors == [] and len(bv.read(tmp_path).votes) == 80


VOTER = """
import sys
from pathlib import Path
from runs.evolution import Evolution, Lora, Sample, Snapshot
from ui.run import blind_vote as bv
folder = Path(sys.argv[1])
lora = lambda step: Lora(Path(f"{step}.safetensors"), 1, False, step, None)
samples = lambda step: (Sample(Path(f"{step}.png"), "step", step, 0),)
found = Evolution(snapshots=tuple(Snapshot(step, None, None, None, None, lora(step), samples(step)) for step in (100, 200)))
for n in range(100000):
    bv.cast(folder, bv.next_pair(found, bv.Ballot()).id, "left", found)
    print(n + 1, flush=True)
"""


def test_a_vote_that_was_acknowledged_survives_sigkill(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", VOTER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    for _ in range(20):
        acknowledged = int(process.stdout.readline())
    process.kill()
    rest = process.communicate(timeout=60)[0].split()
    acknowledged = int(rest[-1]) if rest else acknowledged
    assert acknowledged <= len(bv.read(tmp_path).votes) <= acknowledged + 1


# What the votes say ----------------------------------------------------------------------------------------------------


def test_the_lora_that_is_liked_best_is_named(tmp_path):
    right = 0
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found, rng = run_of(range(100, 700, 100)), random.Random(seed)
        steps = bv.candidates(found, [])
        while bv.picked(folder, found) is None:
            vote(folder, found, lambda step: 3 - abs(step - 400) / 100, rng)
        votes = bv.read(folder).votes
        assert bv.enough(6) <= len(votes) <= 2 * bv.enough(6)
        winner = bv.picked(folder, found)
        text = bv.verdict(bv.standings(steps, votes), votes)
        assert f"The vote picks step {winner}" in text and "with a chance of" in text
        right += winner == 400
    assert right >= 4


def test_equal_loras_give_a_plain_answer(tmp_path):
    found, rng = run_of([100, 200]), random.Random(1)
    for number in range(2 * bv.enough(2)):
        pair = bv.next_pair(found, bv.read(tmp_path), rng)
        bv.cast(tmp_path, pair.id, "equal", found)
        if number < bv.enough(2):
            assert bv.picked(tmp_path, found) is None
    votes = bv.read(tmp_path).votes
    text = bv.verdict(bv.standings([100, 200], votes), votes)
    assert "but by little" in text and "about as much" in text and bv.picked(tmp_path, found) in (100, 200)


def test_the_same_votes_give_the_same_numbers(tmp_path):
    found = run_of([100, 200, 300])
    vote(tmp_path, found, lambda step: step / 100, random.Random(3), 12)
    votes = bv.read(tmp_path).votes
    assert bv.standings([100, 200, 300], votes) == bv.standings([100, 200, 300], votes)
    assert bv.verdict(bv.standings([100, 200, 300], []), []) == "Vote on 9 pairs, then the vote names a LoRA."
