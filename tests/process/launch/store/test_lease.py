"""The lease: two or three machines, every interleaving that Hypothesis finds, clocks of different speed, lost answers.

A contender runs the real `Lease` in a greenlet. Each of its calls to the store stops twice, before it takes effect and
before its answer arrives; which contender goes on, and how much time passes, is drawn. So a schedule is exact and can
be repeated.

The campaign, 20 minutes: HANGPROOF_EXAMPLES=100 python -m pytest tests/process/launch/store/test_lease.py -k two_never
"""

import sys
from dataclasses import replace

import greenlet
import pytest
from hypothesis import given, settings, strategies as st
from seeds import examples
from store_helpers import QUICK, acquired

from launch.store.lease import Claim, Lease, Owner, current, is_dead, parse_claim, this_owner
from launch.store.places import NotFound, Unavailable, open_place

PERIOD_S = 60.0


class World:
    """The store, the true time, and whose turn it is."""

    def __init__(self, faults: list[str]):
        self.files: dict[str, bytes] = {}
        self.now = 0.0
        self.faults = faults  # one for each write, in order: "", "fails", "no answer" or "lost"
        self.contenders: list[Contender] = []
        self.history: list[tuple[int, str]] = []  # the numbers that were held, in order
        self.held_by: dict[int, str] = {}

    def run(self, schedule: list[tuple[int, float]]) -> None:
        """Let contenders go on in this order, each after some seconds; check after each step."""
        for who, wait_s in schedule:
            self.now += wait_s
            self.check()
            self.contenders[who % len(self.contenders)].step()
            self.check()

    def check(self) -> None:
        """At most one holds; nobody holds a number that another held; numbers grow."""
        holders = [c.lease for c in self.contenders if c.lease.valid()]
        assert len(holders) <= 1, [(lease.number, lease.owner.id) for lease in holders]
        for lease in holders:
            assert self.held_by.setdefault(lease.number, lease.owner.id) == lease.owner.id
            if not self.history or self.history[-1] != (lease.number, lease.owner.id):
                assert not self.history or lease.number > self.history[-1][0], "a fencing number was not larger"
                self.history.append((lease.number, lease.owner.id))


class Contender:
    """One machine. It is also the place as this machine sees it."""

    conditional = True

    def __init__(self, world: World, index: int, rate: float):
        self.world = world
        self.owner = Owner(f"{7 - index:016x}", f"machine {index}", "", "", index, "", "2026-11-22T00:00:00Z")
        self.clock = lambda: world.now * rate + index * 1000.0
        self.lease = self.waiting()
        self.step = greenlet.greenlet(self.live).switch  # go on until the next stop

    def waiting(self) -> Lease:
        return Lease(self, self.owner, PERIOD_S, clock=self.clock, dead=lambda owner: False)

    def live(self) -> None:
        while True:
            if self.lease.poll() in ("lost", "released"):
                self.lease = self.waiting()
            self.wait_here()

    def wait_here(self) -> None:
        """Stop here until the schedule lets this contender go on."""
        greenlet.getcurrent().parent.switch()

    # The place

    def limited(self, **limits: float) -> "Contender":
        return self

    def create(self, name: str, data: bytes, new: bool = True) -> bool:
        self.wait_here()
        files = self.world.files
        fault = self.world.faults.pop(0) if self.world.faults else ""
        if fault == "fails":
            raise Unavailable("injected")
        done = not new or name not in files
        if done and fault != "lost":
            files[name] = data
        self.wait_here()
        if fault == "no answer":
            raise Unavailable("injected")
        return done or files.get(name) == data

    def put(self, name: str, data: bytes) -> None:
        self.create(name, data, new=False)

    def read(self, name: str, most_bytes: int = 0) -> bytes:
        self.wait_here()
        data = self.world.files.get(name)
        self.wait_here()
        if data is None:
            raise NotFound(name)
        return data

    def list(self, folder: str = "") -> dict[str, int]:
        self.wait_here()
        names = [name for name in self.world.files if name.startswith(folder)]
        self.wait_here()
        return dict.fromkeys(names, 1)

    def delete(self, names) -> None:
        self.wait_here()
        for name in names:
            self.world.files.pop(name, None)


@st.composite
def schedules(draw, contenders: int) -> list[tuple[int, float]]:
    """Who goes on, after how many seconds.

    One machine comes to hold. Then, several times: one is silent for about a period while others go on, and all
    interleave call by call for a while, which is where a lease can go wrong.
    """
    who = st.integers(0, contenders - 1)
    steps = [(0, 0.5)] * draw(st.sampled_from([0, 20, 40]))
    for _ in range(draw(st.integers(1, 4))):
        active, gap_s = draw(who), draw(st.sampled_from([0.1, 0.5, 1.0, 4.0]))
        alone_s = draw(st.sampled_from([3.0, 30.0, 70.0, 80.0, 160.0])) / (1 + 4 * (gap_s < 0.5))
        steps += [(active, gap_s)] * int(alone_s / gap_s)
        steps += draw(st.lists(st.tuples(who, st.sampled_from([0.0, 0.1, 0.1, 0.5, 3.0])), max_size=40))
        bursts = draw(st.lists(st.tuples(who, st.integers(1, 14), st.sampled_from([0.1, 1.0, 10.0, 80.0])), max_size=8))
        steps += [(one, wait_s if i == 0 else 0.1) for one, count, wait_s in bursts for i in range(count)]
    return steps


FAULTS = st.lists(st.sampled_from(["", "", "", "fails", "no answer", "lost"]), max_size=40)


def contend(count: int, schedule, faults, rates) -> World:
    world = World(faults)
    world.contenders = [Contender(world, i, rates[i]) for i in range(count)]
    world.run(schedule)
    return world


RATES = st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=3, max_size=3)


@given(data=st.data(), count=st.integers(2, 3), rates=RATES, faults=FAULTS)
@settings(max_examples=examples(90))
def test_two_never_hold_the_lease_at_one_time(data, count, rates, faults):
    contend(count, data.draw(schedules(count)), faults, rates)


def test_one_holds_while_it_renews_and_after_its_silence_the_other():
    """The schedules above do reach what they forbid: a machine holds, falls silent, and the next one follows."""
    talking = [(0, 0.5)] * 400
    both, silence = [(0, 0.25), (1, 0.25)] * 800, [(1, 0.5)] * 900
    assert contend(2, talking + both, [], [1.0, 1.1, 1.0]).history == [(1, f"{7:016x}")]
    world = contend(2, talking + silence + [(0, 0.5)] * 40, [], [1.0, 1.1, 1.0])
    assert [owner for _, owner in world.history] == [f"{7:016x}", f"{6:016x}"]
    assert world.history[1][0] > world.history[0][0]


# On a real place ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    return open_place(str(tmp_path / "store"), QUICK).under("my-run")


def lease(place, **options) -> Lease:
    return Lease(place, **{"period_s": 1.2, "settle_s": 0.05, "dead": lambda owner: False, **options})


def test_a_released_lease_is_taken_at_once_and_an_expired_one_after_two_periods(place):
    first, second, third = lease(place), lease(place), lease(place)
    assert acquired(first) and first.valid() and first.number == 1
    assert second.poll() == "waiting" and second.holder == first.owner.text()
    first.release()
    assert first.state == "released" and not first.valid()
    began = second.clock()
    assert acquired(second) and second.number == 2
    assert second.clock() - began < 2 * 1.2
    began = third.clock()
    assert acquired(third, 20) and third.number == 3
    assert third.clock() - began > 2 * 1.2
    assert second.state == "unreachable" and second.poll() == "lost"
    assert second.holder == third.owner.text()


def test_a_store_that_is_away_makes_the_lease_invalid_until_it_is_renewed(place, tmp_path):
    first = lease(place, period_s=0.6)
    assert acquired(first)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("not a folder")
    while first.valid():
        first.poll()
    assert first.state == "unreachable" and "cannot" in first.error
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert first.poll() == "held" and first.error == ""


def test_the_lease_of_a_killed_process_is_taken_at_once(place, tmp_path, spawn):
    code = (
        "import sys, time; from launch.store.lease import Lease; from launch.store.places import open_place\n"
        f"lease = Lease(open_place({str(tmp_path / 'store')!r}).under('my-run'), settle_s=0)\n"
        "assert lease.poll() == 'held'; print('held', flush=True); time.sleep(600)"
    )
    process = spawn(sys.executable, "-c", code)
    assert process.stdout.readline() == "held\n"
    owner = current(place).owner
    assert owner.pid == process.pid and not is_dead(owner)
    mine = Lease(place, settle_s=0)
    assert mine.poll() == "waiting" and f"process {process.pid}" in mine.holder
    process.kill()
    process.wait()
    assert is_dead(owner) and not is_dead(replace(owner, boot_id="another boot"))
    assert not is_dead(replace(owner, process_space="another container"))
    assert acquired(mine) and mine.number == 2


def test_a_claim_that_never_held_gives_no_right_to_hurry(place):
    """A holder may still be valid behind a claim that was created over its expired one, and whose process then died."""
    owner = replace(this_owner(), id="1" * 16)
    place.create("lease/000002.json", Claim(2, owner, period_s=1.2).dumps())
    mine = lease(place, dead=lambda owner: True)
    began = mine.clock()
    assert acquired(mine) and mine.number == 3
    assert mine.clock() - began > 1.2


def test_a_number_is_not_used_again_when_the_store_lost_the_claims(place):
    place.put("manifests/000007-000002.json", b"{}")
    mine = lease(place, period_s=0.3)
    assert acquired(mine) and mine.number == 8


def test_a_claim_that_the_store_lost_is_written_again(place):
    mine = lease(place)
    assert acquired(mine)
    place.delete(["lease/000001.json"])
    assert mine.poll() == "held" and parse_claim(place.read("lease/000001.json")).owner == mine.owner
    place.put("lease/000001.json", Claim(1, replace(this_owner(), id="2" * 16)).dumps())
    assert mine.poll() == "lost"


def test_where_two_can_create_one_number_the_one_whose_claim_was_replaced_gives_way(place):
    mine = lease(place, settle_s=60)
    assert mine.poll() == "claimed"
    place.put("lease/000001.json", Claim(1, replace(this_owner(), id="2" * 16)).dumps())
    assert mine.poll() == "waiting" and not mine.valid()


def test_a_claim_that_cannot_be_read_expires_like_another(place):
    texts = (b"", b"{", b"[]", b"null", b'{"number": 1}', b'{"owner": []}', b'{"number": 1e999, "owner": {}}')
    for data in (*texts, b"\xff", b"[" * 9999):
        assert parse_claim(data) is None, data
    place.put("lease/000004.json", b"{")
    mine = lease(place, period_s=0.3)
    assert mine.poll() == "waiting" and mine.holder == "a machine that is just writing its claim"
    assert acquired(mine) and mine.number == 5


def test_what_another_machine_calls_itself_is_one_short_line():
    owner = replace(this_owner(), host="evil\n\x1b[31m" + "x" * 5000)
    text = parse_claim(Claim(1, owner).dumps()).owner.text()
    assert "\n" not in text and "\x1b" not in text and len(text) < 300


def test_a_replaced_process_takes_its_claim_on_and_stops_where_another_machine_claimed_meanwhile(place):
    first = lease(place)
    assert acquired(first)
    second = lease(place, owner=first.owner, resumes=True)
    assert acquired(second, 1) and second.number == 1
    place.create("lease/000002.json", Claim(2, replace(this_owner(), host="other"), released=True).dumps())
    third = lease(place, owner=first.owner, resumes=True)
    assert third.poll() == "lost" and "other (process" in third.holder
