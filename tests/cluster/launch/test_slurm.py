"""`python -m launch slurm` on a real Slurm. tests/campaigns/test_slurm.py takes the job away in every way it can.

The run is the toy of monitor_helpers, whose result depends on every step.
"""

import sys

import pytest
from monitor_helpers import events, toy_run
from slurm_helpers import SHORT, at_step, completed, launch, log, missing, repeated, submit

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


def test_a_requeued_job_continues_its_run_and_completes_it_with_the_same_result(cluster, tmp_path):
    folder = toy_run(tmp_path / "toy", **SHORT)
    job = submit(cluster, folder, HANGPROOF_AUTH="me:secret")
    assert submit(cluster, folder) == job, "a run has one job"
    at_step(folder, 25)
    cluster.ask("scontrol", "requeue", job)
    completed(cluster, folder, job, starts=2)
    assert repeated(folder) == 0, "the warning was used to save"
    assert [e["kind"] for e in events(folder)].count("preempted") == 1
    assert log(folder, job).count("hangproof: completed") == 1
    stored = b"".join(path.read_bytes() for path in cluster.folder.glob("state/**/*") if path.is_file())
    assert b"HANGPROOF_DATA" in stored and b"me:secret" not in stored, "Slurm keeps the job's environment"


@pytest.mark.journey
def test_a_job_on_a_node_with_gpus_gets_its_gpu_also_where_its_path_needs_quotes(cluster, tmp_path):
    folder = toy_run(tmp_path / 'it\'s a "run" for $5 #1; ünï', steps=5, pace=0.02, every=5)
    shown = 'echo "gpus $SLURM_JOB_GPUS, devices $CUDA_VISIBLE_DEVICES"'
    (folder / "train.sh").write_text(f'{shown}\ncd "$HANGPROOF_RUN"\nexec {sys.executable} toy.py\n', encoding="utf-8")
    answer = launch(cluster, folder, "--submit", "--partition", "gpu")
    assert (answer["gpus"], answer["kind"]) == (1, "")
    completed(cluster, folder, answer["job"], starts=1, steps=5)
    assert "gpus 0, devices 0" in (folder / "training.log").read_text()
