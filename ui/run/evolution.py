"""The part "Evolution" of a run: its samples by prompt and step, its checkpoints compared, a blind vote, likeness.

The component's value is small and says only that something changed; the script then fetches the table from the HTTP API
(ui/snapshot_api.py), which answers "unchanged" where it is. The table is made again only after a file changed, and of
`metrics.jsonl` only what was added is read.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from runs import likeness
from runs.evolution import Evolution, Lora, Losses, Sample, Snapshot, read_prompts, read_samples, table
from runs.files import RunError
from runs.overfitting import best, overfitting
from ui import jobs, scripts
from ui.dataset.images import file_url
from ui.run import blind_vote, view
from ui.run.artifacts import Gallery
from ui.run.calls import answer, folder_of
from ui.run.readers import Stamp, stamp

if TYPE_CHECKING:
    import gradio as gr

    from ui.run.view import View

KEPT = 8  # runs whose losses stay in memory
NEWS_S = 10  # seconds between two looks at the losses of a run that trains
JOB = "likeness"
JOB_LIMIT_S = 3600.0
FILES = ("sample", "sample_prompts.txt", "metrics.jsonl", blind_vote.FILE, likeness.FILE)


class _Run:
    """What is kept of a run between two requests."""

    def __init__(self, folder: Path):
        self.lock = threading.Lock()
        self.losses = Losses(folder / "metrics.jsonl")
        self.stamps: tuple[Any, ...] = ()
        self.found = Evolution()
        self.answer: dict[str, Any] = {}
        self.job: tuple[Stamp, dict[str, Any]] | None = None
        self.picked = stamp(""), ""  # stamp of the votes, file name of the LoRA


_runs: OrderedDict[Path, _Run] = OrderedDict()
_lock = threading.Lock()


def _run(folder: Path) -> _Run:
    with _lock:
        one = _runs.pop(folder, None) or _Run(folder)
        _runs[folder] = one
        while len(_runs) > KEPT:
            _runs.popitem(last=False)
        return one


def _stamps(folder: Path, loras: Sequence[Lora]) -> tuple[Stamp | tuple[Lora, ...], ...]:
    return (*(stamp(folder / name) for name in FILES), tuple(loras))


def _read(folder: Path) -> tuple[Evolution, dict[str, Any]]:
    one, loras = _run(folder), view.loras(folder)
    with one.lock:
        now = _stamps(folder, loras)
        if now != one.stamps or any(isinstance(part, Stamp) and part.young for part in now):
            one.losses.update()
            prompts = read_prompts(folder / "sample_prompts.txt")
            one.found = table(prompts, read_samples(folder / "sample"), loras, one.losses)
            one.answer = _summary(folder, one.found, one.losses)
            one.stamps = now
        return one.found, one.answer


def evolution(folder: Path) -> Evolution:
    """The snapshots of a run; read again only after a file changed."""
    return _read(folder)[0]


def summary(folder: Path) -> dict[str, Any]:
    """All snapshots of a run as plain values, with its prompts, its validation and what follows from them."""
    status = view.read(folder)
    return {"run": folder.name, "name": status.name, "state": status.state, **_read(folder)[1], **_likeness(folder)}


def snapshot(folder: Path, step: int) -> dict[str, Any] | None:
    """The snapshot of a step as plain values; None without one."""
    return next((one for one in _read(folder)[1]["snapshots"] if one["step"] == step), None)


def _summary(folder: Path, found: Evolution, losses: Losses) -> dict[str, Any]:
    texts = {one.number: one.text for one in found.prompts}
    seeds = {one.number: one.seed for one in found.prompts}
    picked, lowest = blind_vote.picked(folder, found), best(found.validation)
    alarm, scores = overfitting(found.validation, losses.between), likeness.read(folder)

    def sample(one: Sample) -> dict[str, Any]:
        text = texts.get(one.prompt) or f"Prompt {one.prompt + 1}"
        seed = one.seed if one.seed is not None else seeds.get(one.prompt)
        return {"number": one.prompt, "prompt": text, "seed": seed, "url": versioned(one.path)}

    def row(one: Snapshot) -> dict[str, Any]:
        return {
            "step": one.step,
            "epoch": one.epoch,
            "at": one.at,
            "time": None if one.time is None else datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
            "loss": _short(one.loss),
            "val_loss": _short(one.val_loss),
            "likeness": _short(scores.of([sample.path.name for sample in one.samples])),
            "picked": one.step is not None and one.step == picked,
            "best": lowest is not None and one.step == lowest[0],
            "lora": _lora(one.lora),
            "samples": [sample(each) for each in one.samples],
        }

    numbers = sorted({each.prompt for one in found.snapshots for each in one.samples} | set(texts))
    return {
        "prompts": [{"number": n, "prompt": texts.get(n) or f"Prompt {n + 1}", "seed": seeds.get(n)} for n in numbers],
        "snapshots": [row(one) for one in found.snapshots],
        "validation": [{"step": step, "val_loss": _short(value)} for step, value in found.validation],
        "best": None if lowest is None else {"step": lowest[0], "val_loss": _short(lowest[1])},
        "others": [{"name": one.path.name, "url": versioned(one.path)} for one in found.others],
        "overfitting": alarm.text() if alarm else None,
        "picked": picked,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _lora(lora: Lora | None) -> dict[str, Any] | None:
    if lora is None:
        return None
    return {"name": lora.path.name, "size": lora.size, "final": lora.final, "url": file_url(lora.path)}


def versioned(path: Path) -> str:
    """The URL of a file with the version that it has now: a browser keeps what it got (ui/served.py)."""
    return f"{file_url(path)}?v={stamp(path).mtime_ns:x}"


def _likeness(folder: Path) -> dict[str, Any]:
    scores = likeness.read(folder)
    missing = "" if likeness.find_model() else likeness.ABSENT
    names = [sample.path.name for one in evolution(folder).snapshots for sample in one.samples]
    scored = sum(name in scores.scores for name in names)
    found = {"model": scores.model, "images": scores.images, "own": _short(scores.own), "scored": scored}
    return {"likeness": {**found, "missing": missing}}


def thumb_url(path: Path) -> str:
    """The URL of a sample as a small picture (ui/snapshot_api.py)."""
    return f"api/evolution/{quote(path.parent.parent.name)}/thumb/{quote(path.name)}"


def marks(shown: "View | None") -> dict[str, str]:
    """The word beside LoRAs by file name: which one is picked. Computed again only after a vote."""
    if shown is None:
        return {}
    now = stamp(shown.folder / blind_vote.FILE)
    if not now.size:
        return {}
    one = _run(shown.folder)
    if one.picked[0] != now:
        found = evolution(shown.folder)
        step = blind_vote.picked(shown.folder, found)
        snapshot = None if step is None else found.at_step(step)
        one.picked = now, snapshot.lora.path.name if snapshot and snapshot.lora else ""
    name = one.picked[1]
    return {name: "picked"} if name else {}


# What the page watches -------------------------------------------------------------------------------------------------


def value(shown: "View | None", gallery: Gallery, loras: Sequence[Lora]) -> dict[str, Any]:
    """The component's value: the run, a stamp that changes when there is something new, and the likeness job."""
    if shown is None:
        return {"run": "", "stamp": "", "some": False, "job": None}
    folder = shown.folder
    newest = [row[-1].path.name for _, row in gallery.rows]
    metrics = stamp(folder / "metrics.jsonl")
    parts = [
        *(stamp(folder / name) for name in (blind_vote.FILE, likeness.FILE, "sample_prompts.txt")),
        metrics.mtime_ns // (NEWS_S * 1_000_000_000) if shown.running else metrics,
        [(one.path.name, one.size) for one in loras],
        sum(len(row) for _, row in gallery.rows),
        newest,
    ]
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    some = bool(gallery.rows) or metrics.size > 0
    return {"run": folder.name, "stamp": digest, "some": some, "job": job(folder)}


def job(folder: Path) -> dict[str, Any] | None:
    """The likeness job: its state, its last line, and its error; None when there was none."""
    now = stamp(folder / jobs.FOLDER / f"{JOB}.json")
    if not now.inode:
        return None
    one = _run(folder)
    if one.job is None or one.job[0] != now or one.job[1]["state"] == "running":
        one.job = now, _job(folder)
    return one.job[1]


def _job(folder: Path) -> dict[str, Any]:
    found = jobs.read(folder, JOB)
    if found is None:
        return {"state": "lost", "line": "", "error": ""}
    text, last, errors = jobs.output(folder, JOB) if found.state != "done" else ("", None, "")
    line = (text.strip().splitlines() or [""])[-1] if last is None else ""
    return {
        "state": found.state,
        "line": line[:200] if found.state == "running" else "",
        "error": "" if found.state in ("running", "done") else errors.strip()[-1000:],
    }


# Actions. Each takes and returns plain values; RunError says what is wrong and what to do ----------------------------------


def vote_next(run: str) -> dict[str, Any]:
    """The next pair: its id, its prompt, and how far the vote is.

    Raises:
        RunError: there is no run, or fewer than two LoRAs have samples of the same prompt.
    """
    folder = folder_of(run)
    found, ballot = evolution(folder), blind_vote.read(folder)
    pair = blind_vote.next_pair(found, ballot)
    texts = {one.number: one.text for one in found.prompts}
    steps = blind_vote.candidates(found, ballot.votes)
    return {
        "id": pair.id,
        "prompt": texts.get(pair.prompt) or f"Prompt {pair.prompt + 1}",
        "votes": len(blind_vote.counted(steps, ballot.votes)),
        "enough": blind_vote.enough(len(steps)),
        "loras": len(steps),
        "named": _named(folder, found) is not None,
    }


def vote_cast(run: str, pair: str, choice: str) -> dict[str, Any]:
    """Store a vote ("left", "right" or "equal") on a pair; returns the next one, as `vote_next`.

    Raises:
        RunError: the run, the pair or the choice is unknown, or the vote could not be stored.
    """
    folder = folder_of(run)
    blind_vote.cast(folder, pair, choice, evolution(folder))
    return vote_next(run)


def _named(folder: Path, found: Evolution) -> int | None:
    ballot = blind_vote.read(folder)
    steps = blind_vote.candidates(found, ballot.votes)
    votes = blind_vote.counted(steps, ballot.votes)
    return blind_vote.named(blind_vote.standings(steps, votes), votes) if votes else None


def vote_result(run: str) -> dict[str, Any]:
    """The result of the vote so far: a sentence, and each LoRA with its wins and its chance of being the best.

    Raises:
        RunError: there is no such run.
    """
    folder = folder_of(run)
    found, ballot = evolution(folder), blind_vote.read(folder)
    steps = blind_vote.candidates(found, ballot.votes)
    votes = blind_vote.counted(steps, ballot.votes)
    rows = blind_vote.standings(steps, votes)
    return {
        "text": blind_vote.verdict(rows, votes) if len(rows) > 1 else blind_vote.too_few(found),
        "votes": len(votes),
        "named": blind_vote.named(rows, votes) if votes else None,
        "picked": blind_vote.picked(folder, found),
        "rows": [{"step": one.step, "won": one.won, "seen": one.seen, "chance": round(one.chance, 3)} for one in rows],
    }


def vote_reset(run: str) -> dict[str, Any]:
    """Forget the votes and the pick of a run.

    Raises:
        RunError: there is no such run, or it could not be stored.
    """
    blind_vote.reset(folder_of(run))
    return {}


def pick_lora(run: str, step: int | None) -> dict[str, Any]:
    """Mark the LoRA of a step as the picked one; None removes the mark. Returns the result, as `vote_result`.

    Raises:
        RunError: there is no such run or LoRA, or it could not be stored.
    """
    folder = folder_of(run)
    blind_vote.pick(folder, step, evolution(folder))
    return vote_result(run)


def likeness_start(run: str) -> dict[str, Any]:
    """Start the process that computes the likeness of all samples.

    Raises:
        RunError: there is no such run or model, or it is running already.
    """
    folder, model = folder_of(run), likeness.find_model()
    if model is None:
        raise RunError(likeness.ABSENT)
    jobs.start(folder, JOB, likeness.command(folder, model), JOB_LIMIT_S)
    return {}


def likeness_cancel(run: str) -> dict[str, Any]:
    """End that process; the scores that it has computed are kept.

    Raises:
        RunError: there is no such run.
    """
    jobs.cancel(folder_of(run), JOB)
    return {}


# Calls of the script: a dict from the browser in, a dict out ----------------------------------------------------------------


def evolution_next(data: dict[str, Any]) -> dict[str, Any]:
    """The next pair of the vote."""
    return answer(lambda folder, given: vote_next(folder.name), data)


def evolution_vote(data: dict[str, Any]) -> dict[str, Any]:
    """Store a vote."""
    return answer(lambda folder, given: vote_cast(folder.name, given.get("id", ""), given.get("choice", "")), data)


def evolution_result(data: dict[str, Any]) -> dict[str, Any]:
    """The result of the vote."""
    return answer(lambda folder, given: vote_result(folder.name), data)


def evolution_reset(data: dict[str, Any]) -> dict[str, Any]:
    """Forget the votes."""
    return answer(lambda folder, given: vote_reset(folder.name), data)


def evolution_pick(data: dict[str, Any]) -> dict[str, Any]:
    """Mark a LoRA as picked."""
    return answer(lambda folder, given: pick_lora(folder.name, given.get("step")), data)


def evolution_likeness(data: dict[str, Any]) -> dict[str, Any]:
    """Start or end the likeness job."""

    return answer(lambda folder, given: (likeness_cancel if given.get("cancel") else likeness_start)(folder.name), data)


def build() -> "gr.HTML":
    """The component; its value is that of `value`."""
    return scripts.component(
        "run_samples",
        "run-samples",
        evolution_next,
        evolution_vote,
        evolution_result,
        evolution_reset,
        evolution_pick,
        evolution_likeness,
    )


def body(folder: Path) -> bytes:
    """The summary as JSON."""
    return json.dumps(summary(folder), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
