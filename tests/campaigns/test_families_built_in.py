"""Every family of the built-in trainer under the monitor, killed five times: the LoRA has the bytes of a calm run.

Tiny models of the real classes on a processor; no network. About two minutes a family.
"""

import shlex
import sys

import pytest
import tiny_pipelines
from monitor_helpers import finish, monitor
from run_facts import status
from trainer_helpers import ROOT, flags, make_config, make_images, sha

from trainer import tiny_flux

KILLS = (2, 3, 4, 6, 7)
pytestmark = pytest.mark.timeout(1800)


def trained(folder, model, config, kills=()):
    """A run of eight steps under the monitor; its attempt N is killed in the step kills[N - 1]. Returns its LoRA."""
    folder.mkdir(parents=True)
    saves = {"max_train_steps": 8, "save_every_n_steps": 2, "save_state": True}
    words = flags(model, config, folder, output_name=folder.name, **saves)
    faults = "".join(f'[ "$HANGPROOF_ATTEMPT" = {n} ] && TEST_FAULT=kill@{at}+0\n' for n, at in enumerate(kills, 1))
    (folder / "train.sh").write_text(
        f"cd {ROOT}\nexport TEST_FAULT=\n{faults}set -- ${{HANGPROOF_RESUME:+--resume \"$HANGPROOF_RESUME\"}}\n"
        f'exec {sys.executable} -m trainer {shlex.join(words)} "$@"\n',
        encoding="utf-8",
    )  # fmt: skip
    paths = f"{ROOT}:{ROOT / 'tests/support'}"
    more = {"HANGPROOF_INJECT": "trainer_helpers:fault", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    code, out, err = finish(monitor(folder, limits="restart.backoff_first_s = 0.1", **more), 1500)
    assert code == 0, (out + err)[-3000:]
    return folder / f"{folder.name}.safetensors"


@pytest.mark.parametrize("pipeline", ["FluxPipeline", *sorted(tiny_pipelines.PIPELINES)])
def test_five_kills_under_the_monitor_leave_the_bytes_of_none(pipeline, tmp_path):
    make = tiny_pipelines.make if pipeline in tiny_pipelines.PIPELINES else lambda _, folder: tiny_flux.ensure(folder)
    model = make(pipeline, tmp_path / "model")
    config = make_config(tmp_path / "two.toml", make_images(tmp_path / "images"), batch_size=2)
    whole = trained(tmp_path / "whole" / "lora", model, config)
    killed = trained(tmp_path / "killed" / "lora", model, config, KILLS)
    assert status(killed.parent)["attempt"] == len(KILLS) + 1
    assert sha(killed) == sha(whole)
