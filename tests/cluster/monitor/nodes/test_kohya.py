"""kohya's trainers on two machines that share a disk: the same training as two processes on one, also after a killed rank."""

import os
import shlex
from dataclasses import dataclass, field

import netns
import pytest
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import incidents, status
from nodes_helpers import LIMITS, Group
from runs_helpers import spec
from safetensors.numpy import load_file
from world_helpers import difference, losses

import runs
from runs.quoting import quote
from tests.upstream.test_world import MUSUBI, SAVES, SD_SCRIPTS, TESTS, train

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())]
MORE = [*SAVES, "--max_train_epochs", "12"]


@dataclass
class Shared(Group):
    """Machines whose script is kohya's; `variables` is its environment."""

    variables: dict[str, str] = field(default_factory=dict)

    def env(self, node, **more):
        return {**self.variables, **super().env(node, **more)}


def script(backend: str, folder) -> tuple[str, dict[str, str]]:
    """The script of a machine, with the launcher's words as `runs` renders them, and its environment."""
    if backend == "musubi":
        tiny, work, model = tiny_musubi, tiny_musubi.workdir(), "z-image"
        tiny.cached(work, folder)
        line, name = tiny.arguments(work, folder / "dataset.toml", folder, *MORE), tiny.trainer()
    else:
        tiny, work, model = tiny_sd_scripts, tiny_sd_scripts.workdir(), "flux-dev"
        line, name = tiny.arguments(work, folder, *MORE), "flux_train_network.py"
    words = [
        word
        for row in runs.launch(spec(nodes=2, gpus=1, backend=backend, mixed_precision="no", model=model))
        for word in row
    ]
    words = [*words[: words.index("-m")], "-m", "sd_scripts_patches", str(tiny.checkout() / name)]
    start = f"{tiny.python()} -m accelerate.commands.accelerate_cli {' '.join(map(quote, words))} {shlex.join(line)}"
    variables = tiny.environment(work, HANGPROOF_WORLD="2")
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(TESTS)])
    kept = {
        k: v
        for k, v in variables.items()
        if k not in ("HANGPROOF_RUN", "HANGPROOF_HEARTBEAT") and os.environ.get(k) != v
    }
    text = f'cd {tiny.checkout()}\nexec {start} ${{HANGPROOF_RESUME:+--resume "$HANGPROOF_RESUME"}}\n'
    return text, kept


@pytest.mark.parametrize("backend", [SD_SCRIPTS, MUSUBI])
def test_two_machines_train_as_two_processes_of_one_also_after_a_killed_rank(backend, tmp_path):
    one = tmp_path / "one"
    done = train(backend, one, 2, *MORE)
    assert done.returncode == 0, done.stdout[-3000:]
    with netns.machines(2) as machines:
        group = Shared(tmp_path, machines, shared=True, limits=LIMITS)
        group.run.mkdir(parents=True)
        text, group.variables = script(backend, group.run)
        (group.run / "train.sh").write_text(text, encoding="utf-8")
        group.start()
        group.wait_step(5, 300)
        group.kill(machines[1].find("sd_scripts_patches")[-1:])
        assert group.finish(600) == [0, 0], group.console()
        assert group.living() == {}
    assert status(group.run)["restarts"] == 1 and incidents(group.run)[0]["evidence"]["rank"] == 1
    assert len(losses(one)) >= 40 and difference(losses(one), losses(group.run)) < 1e-5
    lora, other = (load_file(folder / "tiny.safetensors") for folder in (one / "made", group.run))
    assert lora.keys() == other.keys() and all((lora[name] == other[name]).all() for name in lora)
