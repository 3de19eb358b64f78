"""One table of limits: each limit of the monitor is longer than those inside it, and none is missing from the table."""

import ast
import re
import threading
from collections import deque
from types import SimpleNamespace

import pytest

from guards import limits
from guards.heartbeat import PHASES
from monitor import config
from runs.paths import ROOT
from sd_scripts_patches import timeouts
from trainer import loop

SETUP_ONLY = {"sd_scripts_patches/install.py", "trainer/tiny_flux.py"}
"""They run before any training starts, or start trainings of their own."""
INTERVALS = ("POLL_S", "PAUSE_S", "AGE_S")
"""How often something is checked, and from what age on it is reported or deleted. They kill and give up nothing."""


def sources():
    """The code of the training process."""
    for folder in ("guards", "sd_scripts_patches", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name != "guards/limits.py" and name not in SETUP_ONLY:
                yield name, path.read_text(encoding="utf-8")


RAISED = {"none": (), "all": tuple(limits.TABLE), **{name: (name,) for name, row in limits.TABLE.items() if row.user}}


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
def test_each_outer_limit_is_at_least_the_inner_one_plus_its_grace_whatever_a_user_raises(monkeypatch, raised):
    monkeypatch.delenv("HANGPROOF_LIMITS", raising=False)
    for name, limit in limits.TABLE.items():
        monkeypatch.delenv(limits.variable(name), raising=False)
        if limit.user and name in raised:
            monkeypatch.setenv(limits.variable(name), str(20_000 + limit.default_s))
    loaded = config.load()
    pairs = [(name, key) for name, limit in limits.TABLE.items() for key in limit.outer]
    assert len(pairs) >= len(limits.TABLE)
    for name, key in pairs:
        value = loaded
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        assert value >= limits.seconds(name) + limits.TABLE[name].grace_s, f"{key} < {name}"


def test_a_finished_process_is_gone_within_a_minute_and_before_the_monitor_acts():
    """Whatever its tracker does: after it the exit grace and the workers, or, in the built-in trainer, these alone.
    The monitor killed a finished process after 7.5 to 15 s; its threads and handlers alone may take 15 s."""
    limit_s = {name: limit.default_s for name, limit in limits.TABLE.items()}
    exit_s = limit_s["exit_grace_s"] + limit_s["shutdown_s"] + limit_s["flush_s"]
    assert max(exit_s, limit_s["flush_s"] + limit_s["end_workers_s"]) + limit_s["trackers_end_s"] <= 60
    assert config.minimums({})["watch.exit_s"] >= exit_s


def test_the_patches_offer_the_limits_of_this_table_as_flags():
    flags = {line.split()[0] for line in timeouts.listing().splitlines()}
    assert all((f"--hangproof_{name}" in flags) == limit.user for name, limit in limits.TABLE.items())


def test_a_limit_that_is_off_encloses_nothing_and_one_that_is_no_number_is_refused():
    off = {limits.variable(name): "0" for name, limit in limits.TABLE.items() if limit.user}
    assert limits.seconds("npz_timeout_s", off) == 0
    assert limits.seconds("flush_s", {"HANGPROOF_FLUSH_S": "100"}) == limits.TABLE["flush_s"].default_s
    assert config.minimums(off | {"HANGPROOF_EXIT_GRACE_S": "0.5"})["watch.exit_s"] == 10.5
    assert config.minimums(off)["watch.exit_s"] == 10  # the constants: nobody can switch them off
    for text in ("soon", "-1", "inf", "nan"):
        with pytest.raises(limits.LimitError, match="HANGPROOF_NPZ_TIMEOUT_S='.*': expected seconds, 0 for no limit"):
            limits.seconds("npz_timeout_s", {"HANGPROOF_NPZ_TIMEOUT_S": text})
        unreadable = dict.fromkeys(("HANGPROOF_BARRIER_TIMEOUT_S", "HANGPROOF_COLLECTIVE_S"), text)
        assert config.minimums(unreadable).get("watch.between_steps_s") is None


def test_the_trainer_saves_first_and_ends_its_trackers_within_their_limit(tmp_path, monkeypatch, capsys):
    """A tracker that hangs lost the LoRA: it was ended before the save, without a limit."""
    events = []
    hung = threading.Event()
    monkeypatch.setenv("HANGPROOF_TRACKERS_END_S", "0.3")
    monkeypatch.setattr(loop, "save_lora", lambda t, path, step: events.append(f"saved {path.name}"))
    states = {"save_state": False, "save_state_on_train_end": False}
    training = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path), output_name="x", log_with="wandb", **states),
        main=True,
        say=events.append,
        hb=SimpleNamespace(phase=lambda name, note: events.append(f"{name}: {note}")),
        accelerator=SimpleNamespace(trackers=["wandb"], end_training=lambda: hung.wait(120)),
    )
    try:
        loop.finish(training, 5, deque())
        loop.end(training, iter([]))
    finally:
        hung.set()
    assert events == ["saved x.safetensors", "end: closing the trackers", "end: stopping the data loader's workers"]
    assert "waited 0.3 s for wandb to finish" in capsys.readouterr().err
    assert training.end_note == "the tracker did not finish: waited 0.3 s for wandb to finish"


def literal(node: ast.AST | None) -> bool:
    """A number greater than 0 that is written in the code, also as part of a sum or product."""
    if isinstance(node, ast.BinOp):
        return literal(node.left) or literal(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > 0


# Which argument of a call is its limit.
POSITIONS = dict.fromkeys(("Deadline", "exit_within", "Timer", "alarm"), 0) | {"bounded": 1}
POSITIONS |= dict.fromkeys(("join", "wait", "acquire", "result"), -1)


def literal_limits(source: str) -> list[str]:
    """The calls and constants of `source` that set a limit by a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and literal(node.value):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found += [n for n in names if re.fullmatch(r"[A-Z_]*_S", n) and not n.endswith(INTERVALS)]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        limits_of = [k.value for k in node.keywords if k.arg in ("timeout_s", "timeout", "seconds", "grace_s")]
        if called in POSITIONS:
            limits_of += node.args[POSITIONS[called] :][:1]
        found += [ast.unparse(node)] if any(map(literal, limits_of)) else []
    return found


def test_no_limit_of_the_training_process_is_written_outside_the_table():
    found = {name: hits for name, source in sources() if (hits := literal_limits(source))}
    assert found == {}


def test_every_limit_that_the_code_names_is_in_the_table_and_every_row_is_used():
    text = "\n".join(source for _, source in sources())
    named = set(re.findall(r"""(?:seconds|limit)\(\s*["'](\w+)["']""", text))
    named |= set(re.findall(r"""TABLE\[["'](\w+)["']\]""", text))
    named |= {f"phase_{phase}_s" for phase in PHASES}
    assert named == set(limits.TABLE)
