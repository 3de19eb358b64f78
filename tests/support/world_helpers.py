"""Runs of several processes: real ones, started by accelerate with the flags of a run's script."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from monitor_helpers import finish
from runs_helpers import spec

from runs import command
from runs.quoting import Variable


def launcher(processes: int, backend: str = "diffusers", **fields: object) -> list[str]:
    """What stands between Python and `-m MODULE` where a script starts so many processes; nothing for one, which starts directly."""
    made = spec(gpus=processes, backend=backend, mixed_precision="no", **fields)
    options = [word for line in command.launch_options(made) for word in line]
    return [] if made.gpus * made.nodes == 1 else ["-m", "accelerate.commands.accelerate_cli", *options]


def at_node(words: list[str], node: int, port: int) -> list[str]:
    """The launcher's words on machine `node`, with the values of the variables that the script reads."""
    values = {command.NODE: str(node), command.MAIN_ADDRESS: "127.0.0.1", command.MAIN_PORT: str(port)}
    return [values.get(word, word) if isinstance(word, Variable) else word for word in words]


def exported(processes: int, nodes: int = 1) -> dict[str, str]:
    """The variables with the number of processes, as the script exports them."""
    ours = ("HANGPROOF_WORLD", "PET_")
    variables = command.environment(spec(gpus=processes, nodes=nodes))
    return {key: value for key, value in variables.items() if key.startswith(ours)}


def losses(run: Path) -> list[float]:
    """The loss of each optimizer step, in order; of a step that was trained twice the last one."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {line["step"]: line["loss"] for line in lines if line.get("kind") == "step"}
    assert list(found) == sorted(found)
    return [found[step] for step in sorted(found)]


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two rows of losses, which must be of one length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def run(line: list[str], env: dict[str, str], cwd: Path, limit_s: float = 400) -> subprocess.CompletedProcess:
    """Run a launcher to its end; both streams in `stdout`. What it leaves behind after `limit_s` is killed, and it fails."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(line, env=env, cwd=cwd, **both, encoding="utf-8", errors="replace")
    code, output, _ = finish(process, limit_s)
    return subprocess.CompletedProcess(line, code, output)
