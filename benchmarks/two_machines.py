"""Two machines start the same run at once, and their links to the store are cut at random: is there ever a second writer?

    python -m benchmarks two_machines [--trials 100] [--seed S] [--json]

Decision: three network namespaces on one bridge, each machine also with process numbers of its own, and an S3 server (moto) in
the third. Nothing of ours is asked who wrote: the server's own log says which address wrote what, in which order. A write is
one of a second writer when another address with a higher lease has written before it. What a cut link delivers late is counted
apart: a request that was sent while the lease was held, and arrives after it, changes nothing that anybody reads (contents
have their hash as name, a manifest its lease).

In each trial at least one machine must complete the run with the bytes of the undisturbed LoRA; a machine that does not must end
by itself with exit code 4 and name the other one. Needs Linux, root, iproute2 and moto (requirements-dev.txt).
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import checkout
from benchmarks.machines import Machine, toy
from benchmarks.report import CannotMeasure, Report

netns = checkout.support("netns")
STEPS, EVERY = 300, 20
PORT = 5000
BUCKET = "runs"
LIMITS = {"lease_s": 3, "connect_s": 60, "copy_s": 0.5, "status_s": 0.5, "flush_s": 30, "bandwidth_bytes": 0}
CUTS_S = (0.3, 1.0, 3.0, 6.0, 12.0)
HOLDER_CUTS_S = (6.0, 9.0, 12.0, 15.0)  # long enough for the other machine to take the lease, or nearly
LAST_CUT_S = (4.0, 12.0)  # none begins later after the start; half of them while the lease is taken
END_S = 120.0
LOG = re.compile(r'^(\S+) - - \[[^]]*\] "(?:.\[\d+m)*PUT /\w+/([^/]+)/toy/(\S+) HTTP/1\.[01](?:.\[\d+m)*" 200')
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent",
}


@dataclass
class Trial:
    """One trial. `cuts`: (machine, so many seconds after the start, for so many). `holder_cut`: the same for the machine that
    takes the lease first, after it took it. `codes`, `reasons`: of each machine."""

    number: int
    cuts: list[tuple[int, float, float]]
    holder_cut: tuple[float, float] | None = None
    codes: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    manifests: int = 0  # in the log of the server
    late_writes: int = 0
    took_s: float = 0.0
    violations: list[str] = field(default_factory=list)


@contextmanager
def server(node: Any, log: Path) -> Iterator[None]:
    """An S3 server in a namespace; its log of requests goes to `log`."""
    code = "from moto.server import main; main()"
    command = [*node.command([]), sys.executable, "-c", code, "-H", node.address, "-p", str(PORT)]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    make = f"""
import http.client, time
for _ in range(200):
    try:
        connection = http.client.HTTPConnection("{node.address}", {PORT}, timeout=5)
        connection.request("PUT", "/{BUCKET}")
        assert connection.getresponse().status == 200
        break
    except OSError:
        time.sleep(0.1)
else:
    raise SystemExit("the S3 server does not answer")
"""
    try:
        subprocess.run([*node.command([]), sys.executable, "-c", make], check=True, timeout=60)
        yield
    finally:
        process.kill()
        process.wait(10)


def second_writers(lines: list[str], run: str) -> tuple[int, int, list[str]]:
    """(manifests, writes that arrived late, manifests of a second writer) of the store's folder `run` in the server's log."""
    leases, wrote = (
        dict[str, int](),
        dict[str, int](),
    )  # by address: the highest claim; the highest lease that it wrote under
    manifests, late, violations = 0, 0, []
    for line in lines:
        match = LOG.match(line)
        if match is None or match[2] != run:
            continue
        address, name = match[1], match[3]
        if name.startswith("lease/"):
            leases[address] = max(leases.get(address, 0), int(name[6:12]))
            continue
        own = leases.get(address, 0)
        later = [other for other, number in wrote.items() if other != address and number > own]
        if later and name.startswith("manifests/"):
            violations.append(f"{address} wrote {name} after {later[0]} had written under lease {wrote[later[0]]}")
        late += bool(later)
        manifests += name.startswith("manifests/")
        if name.startswith("manifests/") and int(name[10:16]) != own:
            violations.append(f"{address} wrote {name} while its newest claim was {own}")
        wrote[address] = max(wrote.get(address, 0), own)
    return manifests, late, violations


def first_holder(log: Path, run: str, nodes: list[Any]) -> Any:
    """Wait for the first claim in the server's log; whose it is. RuntimeError: nobody claims."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if (match := LOG.match(line)) and match[2] == run and match[3].startswith("lease/"):
                return next(node for node in nodes if node.address == match[1])
        time.sleep(0.05)
    raise RuntimeError(f"{run}: no machine claimed the lease within {END_S:.0f} s")


def play(trial: Trial, nodes: list[Any], address: str, work: Path, log: Path) -> None:
    """Run one trial; its outcome is written into `trial`."""
    training = toy(STEPS, EVERY)
    store = f"s3://{BUCKET}/trial-{trial.number}"
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}
    machines = [
        Machine(training, work / f"trial-{trial.number}-{i}", dict(environment), tuple(node.command([])), dict(LIMITS))
        for i, node in enumerate(nodes)
    ]
    began_s = time.monotonic()
    try:
        for machine in machines:
            training.create(machine.data, {"store": store})
        for machine in machines:
            machine.run()
        moments = sorted(
            [(at_s, i, False) for i, at_s, _ in trial.cuts] + [(at_s + for_s, i, True) for i, at_s, for_s in trial.cuts]
        )
        start_s = time.monotonic()
        if trial.holder_cut is not None:
            after_s, for_s = trial.holder_cut
            holder = first_holder(log, f"trial-{trial.number}", nodes)
            time.sleep(after_s)
            holder.link(False)
            time.sleep(for_s)
            holder.link(True)
        for at_s, i, up in moments:
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            nodes[i].link(up)
        for node in nodes:
            node.link(True)
        for machine in machines:
            trial.codes.append(machine.wait(END_S))
            trial.reasons.append(str(machine.status().get("reason")))
    except RuntimeError as error:
        trial.violations.append(str(error))
    finally:
        for node in nodes:
            node.link(True)
        for machine in machines:
            machine.kill()
        trial.took_s = round(time.monotonic() - began_s, 1)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    trial.manifests, trial.late_writes, found = second_writers(lines, f"trial-{trial.number}")
    trial.violations += found
    if len(trial.codes) == len(machines):
        judge(trial, [machine.lora() == training.expected() for machine in machines])


def judge(trial: Trial, whole: list[bool]) -> None:
    """Add what is not as it must be. `whole`: the machine has the undisturbed LoRA."""
    if not trial.manifests:
        trial.violations.append("the server's log names no manifest")
    if not any(code == 0 and lora for code, lora in zip(trial.codes, whole, strict=True)):
        trial.violations.append(f"no machine completed the run: {trial.codes} {trial.reasons}")
    for code, lora, reason in zip(trial.codes, whole, trial.reasons, strict=True):
        named = "(process " in reason and " since 20" in reason
        if code == 0 and not lora:
            trial.violations.append("a machine completed with another LoRA")
        if code not in (0, 4) or (code == 4 and not named):
            trial.violations.append(f"exit code {code}, reason {reason!r}")
    known = ("took the lease", "already completed", "not in the store")
    if trial.codes.count(0) > 1 and not any(text in reason for text in known for reason in trial.reasons):
        trial.violations.append(f"two machines completed the run and neither knows of the other: {trial.reasons}")


def drawn(number: int, draw: random.Random) -> Trial:
    """A trial with one to three cuts; every second one cuts off the machine that took the lease."""
    if number % 2:
        return Trial(number, [], (round(draw.uniform(0.0, 4.0), 2), draw.choice(HOLDER_CUTS_S)))
    cuts = [
        (draw.randrange(2), round(draw.uniform(0.0, draw.choice(LAST_CUT_S)), 2), draw.choice(CUTS_S))
        for _ in range(draw.randint(1, 3))
    ]
    return Trial(number, cuts)


def campaign(trials: int, seed: int, work: Path) -> dict[str, Any]:
    """Play the trials: {"trials", "violations", …}. RuntimeError: namespaces or the server cannot be had."""
    draw, played, began_s = random.Random(seed), list[Trial](), time.monotonic()
    with netns.machines(3) as nodes, server(nodes[2], work / "server.log"):
        for number in range(trials):
            trial = drawn(number, draw)
            play(trial, nodes[:2], f"http://{nodes[2].address}:{PORT}", work, work / "server.log")
            played.append(trial)
            print(
                f"trial {number}: {trial.codes}, {trial.took_s:.0f} s {trial.violations or ''}",
                file=sys.stderr,
                flush=True,
            )
    outcomes = Counter(_outcome(trial) for trial in played)
    return {
        "trials": len(played),
        "seed": seed,
        "outcomes": dict(outcomes),
        "cuts": sum(len(trial.cuts) + bool(trial.holder_cut) for trial in played),
        "late_writes": sum(trial.late_writes for trial in played),
        "took_s": round(time.monotonic() - began_s, 1),
        "violations": [
            f"trial {t.number} (cuts {t.cuts} {t.holder_cut}): {text}" for t in played for text in t.violations
        ],
    }


def _outcome(trial: Trial) -> str:
    if trial.violations:
        return "violation"
    if any("already completed" in reason for reason in trial.reasons):
        return "one started when the other had completed"
    if trial.codes.count(0) > 1:
        return "one completed without the store, which the other had taken"
    loser = trial.reasons[trial.codes.index(4)]
    return "one stopped when the other took its lease" if "took the lease" in loser else "one was refused at the start"


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace) -> Report:
    """One campaign."""
    if why := netns.missing():
        raise CannotMeasure(why)
    with tempfile.TemporaryDirectory(prefix="two-machines-") as work:
        result = campaign(args.trials, args.seed, Path(work))
    return Report(result, result["violations"])
