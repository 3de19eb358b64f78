"""Trainings of several processes: of the built-in trainer, and of kohya's."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from trainer_helpers import ROOT, environment, flags, make_config, make_images
from ui_helpers import free_port
from world_helpers import at_node, exported, launcher, run

from trainer import tiny_flux

STEPS = 6  # two epochs: 10 batches make three steps of four, the last of them with two


def watched(out: Path, folder: Path, processes: int, fault: str) -> dict[str, str]:
    """The variables of a run in this folder, whose beats are in `out`. fault: of benchmarks/injector.py, `NAME@STEP` or `NAME@STEP:RANK`."""
    found = {"HANGPROOF_RUN": str(folder), "HANGPROOF_HEARTBEAT": str(out / "beats"), **exported(processes)}
    if fault:
        name, step, rank = re.fullmatch(r"(\w+)@(\d+):?(\d?)", fault).groups()
        found |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_FAULT": name, "HANGPROOF_FAULT_STEP": step}
        found |= {"HANGPROOF_FAULT_RANK": rank} if rank else {}
    return found


def together(work, out, processes: int, fault: str = "", env=(), **changed):
    """Train with `processes` processes in `out`, as the script starts them."""
    (out / "run").mkdir(parents=True, exist_ok=True)
    argv = flags(work["model"], work["config"], out / "made", save_state=True, **{"max_train_steps": STEPS, **changed})
    command = [sys.executable, *launcher(processes), "-m", "trainer", *argv]
    return run(command, environment(**{**watched(out, out / "run", processes, fault), **dict(env)}), ROOT)


TESTS = Path(__file__).resolve().parent


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
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(TESTS)])
    rest = ["-m", "sd_scripts_patches", str(tiny.checkout() / script), *line]
    words = launcher(processes, backend, nodes=nodes, model=model)
    port = free_port()
    with ThreadPoolExecutor(nodes) as pool:
        ranks = [[str(tiny.python()), *at_node(words, node, port), *rest] for node in range(nodes)]
        first, *_ = pool.map(lambda line: run(line, variables, tiny.checkout()), ranks)
    return first


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The tiny model and a data set of the built-in trainer."""
    folder = tmp_path_factory.mktemp("world")
    config = make_config(folder / "dataset.toml", make_images(folder / "images"))
    return {"model": tiny_flux.ensure(folder / "models" / "tiny-flux"), "config": config}
