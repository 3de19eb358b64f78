"""The lease of a run: which one of several machines may write its store.

A claim is a file `lease/NUMBER.json`, and the highest number counts. Taking the lease is creating the next number,
which only one machine can (compare-and-swap). A holder rewrites its claim with a growing beat; a claim whose bytes have
not changed for its period, by the watcher's own clock, has expired: no two clocks are compared. The number is a fencing
number: it is part of every manifest's name, and readers prefer the highest, so that what a machine writes after it lost
the lease is never used.

Two machines never hold the lease at one moment, not only never with one number. A holder counts its period from
*before* it wrote its beat, and looks for a higher number after it. So a claim that follows an expired one starts to
hold only a period after it was created: by then the earlier holder has seen it, or its own period is over. (Leases by
time are from Gray and Cheriton, 1989; fencing numbers as in Kleppmann, "How to do distributed locking", 2016.) No wait
is needed after a claim that was released, or whose process is known to be dead: it ran on this machine since the same
boot, and its process ID is gone. A process that replaces one beside a training takes on the claim of that one.

Where a place has no conditional write, two machines can create one number. Each reads its claim again after `settle_s`,
and the one whose claim was replaced gives way. One whose request takes longer than that is seen at the next renewal
only: until then both may train, and what they write has one fencing number. So one machine is the rule there, not a
guarantee.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from launch.store.manifest import MANIFESTS, order_of
from launch.store.places import NotFound, Place, StoreError, one_line
from monitor.process import platform
from runs.files import typed

FOLDER = "lease"
CLAIM = re.compile(r"lease/(\d{6,12})\.json")
PERIOD_S = 60.0
WATCH = 1.25  # periods that a watcher waits: clocks may run at different speeds
KEPT_CLAIMS, CLAIM_BYTES = 3, 1 << 16
WAITING, CLAIMED, HELD, LOST, RELEASED = "waiting", "claimed", "held", "lost", "released"
UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Owner:
    """The process that claims: for the other machine's message, and to know whether it is dead."""

    id: str  # random, 16 hexadecimal digits
    host: str
    boot_id: str  # "" where the system has none
    process_space: str  # the kernel's name of the PID namespace: in a container, the same PID is another process
    pid: int
    started: str  # when the process started, in the kernel's words
    since: str  # UTC

    def text(self) -> str:
        """For a message: `host (process 12) since 2026-11-22T09:30:00Z`."""
        return one_line(f"{self.host[:100] or 'an unknown machine'} (process {self.pid}) since {self.since}")


def this_owner() -> Owner:
    """This process, with a new random id."""
    me = platform.process_info(os.getpid())
    return Owner(
        secrets.token_hex(8), socket.gethostname(), platform.boot_id(), platform.namespace(), os.getpid(),
        str(me.start) if me else "", platform.now().utc,
    )  # fmt: skip


def is_dead(owner: Owner) -> bool:
    """Whether the process is known to be gone: it ran here since this boot. False also where that is not known."""
    here = (platform.boot_id(), platform.namespace())
    if not all(here) or (owner.boot_id, owner.process_space) != here:
        return False
    try:
        return not platform.alive(owner.pid, float(owner.started))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Claim:
    """The contents of a claim."""

    number: int
    owner: Owner
    beat: int = 0
    held: bool = False
    released: bool = False
    period_s: float = PERIOD_S

    def dumps(self) -> bytes:
        """As JSON, for `parse_claim`."""
        return json.dumps({"version": 1, **asdict(self)}, ensure_ascii=False, indent=1).encode()


def parse_claim(data: bytes) -> Claim | None:
    """A claim from a file of the store; None when it is not one: half written, or not ours."""
    try:
        claim: Claim = typed(Claim, json.loads(data))
        return replace(claim, period_s=min(3600.0, max(0.0, claim.period_s)))
    except (ValueError, TypeError, RecursionError):
        return None


def name_of(number: int) -> str:
    """The name of a claim in the store."""
    return f"{FOLDER}/{number:06}.json"


def claims(place: Place) -> dict[int, str]:
    """The names of the claims in a store, by number. Raises StoreError."""
    return {int(match[1]): name for name in place.list(FOLDER) if (match := CLAIM.fullmatch(name))}


def current(place: Place) -> Claim | None:
    """The claim that counts now, for people; None where there is none. Raises StoreError."""
    known = claims(place)
    return parse_claim(place.read(known[max(known)], CLAIM_BYTES)) if known else None


def take_away(place: Place, claim: Claim) -> None:
    """Claim the next number and release it at once: a holder that lives sees that and stops. Raises StoreError."""
    number = max(claim.number, newest_lease(place)) + 1
    data = Claim(number, this_owner(), released=True, period_s=claim.period_s).dumps()
    if not place.create(name_of(number), data):
        raise StoreError(f"{place.address}: another machine took the lease just now; look again with `status`")


class Lease:
    """The lease of the run in `place`. `poll` does the work, a few calls each time; `valid` tells whether to write now.

    Call `poll` at least three times a period, from one thread. `state`: waiting (another machine holds it, see
    `holder`), claimed (about to hold), held, unreachable (held, but the store has not answered for a period: write
    nothing), lost (another machine took it: stop), released.
    """

    def __init__(
        self,
        place: Place,
        owner: Owner | None = None,
        period_s: float = PERIOD_S,
        settle_s: float | None = None,
        clock: Callable[[], float] = lambda: platform.now().boot_s,  # runs while the machine is suspended
        dead: Callable[[Owner], bool] = is_dead,
        resumes: bool = False,
    ):
        """resumes: an earlier process of this run, which is gone, held the lease with the owner's ID: its claim is
        taken on, and a claim of anyone else means that the lease is lost. settle_s: until a claim is read again; by
        default a 30th of the period, or a sixth where the place has no conditional write. clock: seconds."""
        # Not less than a connection takes on a busy machine. `valid` does not depend on it.
        self.place = place.limited(call_s=max(3.0, period_s / 6), tries=3, first_wait_s=period_s / 240)
        self.owner = owner or this_owner()
        self.period_s = period_s
        self.settle_s = period_s / (30 if place.conditional else 6) if settle_s is None else settle_s
        self.clock, self.dead, self.resumes = clock, dead, resumes
        self.number = 0  # of the own claim
        self.holder = ""  # who holds the lease, or who took it
        self.error = ""  # of the last poll
        self.seen_alive = False  # while this machine waited, another one renewed its claim
        self._state = WAITING
        self._valid_until = float("-inf")
        self._beat = 0
        self._hold_from = 0.0  # when a claim may begin to hold
        self._seen: tuple[int, bytes, float] = (0, b"", 0.0)  # the claim that counts, its bytes, since when it does

    @property
    def state(self) -> str:
        """See the class."""
        return UNREACHABLE if self._state == HELD and not self.valid() else self._state

    def valid(self) -> bool:
        """Whether this process holds the lease now. Asks no store: call it before every write."""
        return self._state == HELD and self.clock() < self._valid_until

    def poll(self) -> str:
        """Go on with what is under way: watch, claim, renew. Returns the state; the store's failure is in `error`."""
        self.error = ""
        try:
            if self._state == WAITING:
                self._watch()
            if self._state in (CLAIMED, HELD):
                self._renew()
        except StoreError as error:
            self.error = str(error)
        return self.state

    def release(self) -> None:
        """Let the next machine have the lease at once. Does nothing when it is not held. Raises StoreError."""
        before, self._state = self._state, RELEASED
        self._valid_until = float("-inf")
        if before in (HELD, CLAIMED) and self._is_own():
            self._write(held=before == HELD, released=True)

    def _watch(self) -> None:
        """Claim the next number when the claims that count are released, dead or expired."""
        top = max(claims(self.place), default=0)
        data = self._read(top) if top else b""
        claim = parse_claim(data)
        watch_s = WATCH * max(self.period_s, claim.period_s if claim else 0.0)
        if claim is not None and claim.owner.id == self.owner.id:
            self._beat = claim.beat  # an earlier call created it after all, or an earlier process
            self._claimed(top, 0.0 if self.resumes else watch_s)
            return
        if claim is not None and self.resumes:
            self._lose()
            return
        if (top, data) != self._seen[:2]:
            self.seen_alive = self._seen[0] > 0
            self._seen = top, data, self.clock()  # the clock is read after the claims
        busy = top > 0 and (claim is None or not (claim.released or self.dead(claim.owner)))
        if busy:
            self.holder = claim.owner.text() if claim else "a machine that is just writing its claim"
        if busy and self.clock() - self._seen[2] < watch_s:
            return
        newest = newest_lease(self.place)
        number, self._beat = max(top, newest) + 1, 0
        # A claim that never held may have followed one that still does; and a store may have lost the claim that does.
        at_once = newest <= top and not busy and (claim is None or claim.held)
        if self.place.create(name_of(number), Claim(number, self.owner, period_s=self.period_s).dumps()):
            self._claimed(number, 0.0 if at_once else watch_s)

    def _claimed(self, number: int, wait_s: float) -> None:
        self.number, self._state = number, CLAIMED
        self._hold_from = self.clock() + max(wait_s, self.settle_s)

    def _renew(self) -> None:
        """Write the own claim again. It holds from then on, if it has waited long enough and none came after it.

        One that still waits is written, too, so that another watcher does not take it for a dead one.
        """
        began, held = self.clock(), self._state == HELD
        holds = held or began >= self._hold_from
        is_own = self._is_own()
        if is_own:
            self._write(held=holds)
        if not is_own or max(claims(self.place), default=0) > self.number:
            if held:
                self._lose()
            else:
                self._state, self._seen = WAITING, (0, b"", 0.0)
        elif holds:
            self._state, self.holder = HELD, self.owner.text()
            self._valid_until = began + self.period_s
            if not held:
                old = [name for number, name in claims(self.place).items() if number <= self.number - KEPT_CLAIMS]
                self.place.delete(old)

    def _write(self, held: bool = False, released: bool = False) -> None:
        self._beat += 1
        claim = Claim(self.number, self.owner, self._beat, held, released, self.period_s)
        self.place.put(name_of(self.number), claim.dumps())

    def _read(self, number: int) -> bytes:
        try:
            return self.place.read(name_of(number), CLAIM_BYTES)
        except NotFound:
            return b""

    def _is_own(self) -> bool:
        """Whether the own claim is still there. A store may lose what it confirmed: one that holds is written again."""
        data = self._read(self.number)
        claim = parse_claim(data)
        return self.valid() if not data else claim is not None and claim.owner.id == self.owner.id

    def _lose(self) -> None:
        self._state, self._valid_until = LOST, float("-inf")
        self.holder = "another machine"
        claim = current(self.place)
        if claim is not None and claim.owner.id != self.owner.id:
            self.holder = claim.owner.text()


def newest_lease(place: Place) -> int:
    """The highest lease number of any manifest: a number is never used twice, even where a store lost its claims."""
    return max((order[0] for name in place.list(MANIFESTS) if (order := order_of(name))), default=0)
