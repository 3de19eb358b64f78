"""Runs of several processes: of the built-in trainer and of kohya's, started by accelerate with a script's flags."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import finish
from runs_helpers import spec
from trainer_helpers import ROOT, environment, flags, make_config, make_images, metrics
from ui_helpers import free_port

from runs import command
from trainer import tiny_flux

STEPS = 6  # two epochs: 10 batches make three steps of four, the last of them with two


def launcher(processes: int, backend: str = "diffusers", **fields: object) -> list[str]:
    """What stands between Python and `-m MODULE` where a script starts so many processes; nothing for one."""
    made = spec(gpus=processes, backend=backend, mixed_precision="no", **fields)
    options = [word for line in command.launch_options(made) for word in line]
    return [] if made.gpus * made.nodes == 1 else ["-m", "accelerate.commands.accelerate_cli", *options]


def losses(run: Path) -> list[float]:
    """The loss of each optimizer step, in order; of a step that was trained twice the last one."""
    found = {line["step"]: line["loss"] for line in metrics(run)}
    assert list(found) == sorted(found)
    return [found[step] for step in sorted(found)]


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two rows of losses, which must be of one length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def run(line: list[str], env: dict[str, str], cwd: Path, limit_s: float = 400) -> subprocess.CompletedProcess:
    """Run a launcher to its end; both streams in `stdout`. What is left after `limit_s` is killed, and it fails."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(line, env=env, cwd=cwd, **both, encoding="utf-8", errors="replace")
    code, output, _ = finish(process, limit_s)
    return subprocess.CompletedProcess(line, code, output)


def watched(out: Path, folder: Path, processes: int, fault: str) -> dict[str, str]:
    """The variables of a run whose beats are in `out`. fault: of benchmarks/injector.py, `NAME@STEP[:RANK]`."""
    found = {"HANGPROOF_RUN": str(folder), "HANGPROOF_HEARTBEAT": str(out / "beats")}
    exported = command.environment(spec(gpus=processes)).items()  # by the script
    found |= {key: value for key, value in exported if key.startswith(("HANGPROOF_WORLD", "PET_"))}
    if fault:
        name, step, rank = re.fullmatch(r"(\w+)@(\d+):?(\d?)", fault).groups()
        found |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_FAULT": name, "HANGPROOF_FAULT_STEP": step}
        found |= {"HANGPROOF_FAULT_RANK": rank} if rank else {}
    return found


def together(work, out, processes: int, fault: str = "", env=(), **changed):
    """Train with `processes` processes in `out`, as the script starts them."""
    (out / "run").mkdir(parents=True, exist_ok=True)
    argv = flags(work["model"], work["config"], out / "made", save_state=True, **{"max_train_steps": STEPS, **changed})
    line = [sys.executable, *launcher(processes), "-m", "trainer", *argv]
    return run(line, environment(**{**watched(out, out / "run", processes, fault), **dict(env)}), ROOT)


def train(backend: str, out: Path, processes: int, *more: str, fault: str = "", env=(), nodes: int = 1, **changed: str):
    """Train with `processes` processes on each of so many machines, as their scripts start them.

    Output, losses and metrics are in `out`. All machines are this one; the result is that of the first one.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = watched(out, out, processes, fault) | dict(env)
    if backend == "musubi":
        tiny, work = tiny_musubi, tiny_musubi.workdir()
        config = out / "dataset.toml"
        if not config.exists():
            tiny.cached(work, out)
        script, model = tiny.trainer(), "z-image"
        line = tiny.arguments(work, config, out / "made", *more, **changed)
    else:
        tiny, work = tiny_sd_scripts, tiny_sd_scripts.workdir()
        script, model = "flux_train_network.py", "flux-dev"
        line = tiny.arguments(work, out / "made", *more, **changed)
    variables = tiny.environment(work, **settings)
    rest = ["-m", "sd_scripts_patches", str(tiny.checkout() / script), *line]
    words = launcher(processes, backend, nodes=nodes, model=model)
    values, ranks = {command.MAIN_ADDRESS: "127.0.0.1", command.MAIN_PORT: str(free_port())}, []
    for node in range(nodes):  # the script reads these variables on each machine
        values[command.NODE] = str(node)
        ranks.append([str(tiny.python()), *(values.get(word.removeprefix("$"), word) for word in words), *rest])
    with ThreadPoolExecutor(nodes) as pool:
        first, *_ = pool.map(lambda line: run(line, variables, tiny.checkout()), ranks)
    return first


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The tiny FLUX; it is not changed."""
    return tiny_flux.ensure(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="module")
def work(model, tmp_path_factory):
    """A folder for the runs of a file, with five images."""
    folder = tmp_path_factory.mktemp("runs")
    images = make_images(folder / "images")
    config = make_config(folder / "dataset.toml", images)
    return {"folder": folder, "model": model, "images": images, "config": config}
