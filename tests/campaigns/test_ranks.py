"""Real gloo ranks under the real monitor: one hangs, and `diagnose` names it with its place.

python -m pytest tests/campaigns/test_ranks.py          4 minutes
"""

import json
import subprocess
import sys
import time

from benchmarks.scenario import create, environment
from monitor.cli.commands import rank_report
from monitor.process import tree
from runs.paths import ROOT

LIMIT_S = 500
HANG = {
    "INJECT": "benchmarks.injector:fire",
    "FAULT": "lock_deadlock",
    "FAULT_PHASE": "check point loader",
    "FAULT_STEP": "0",
}


def test_diagnose_shows_the_rank_report_of_a_run_whose_rank_hangs(tmp_path):
    fields = {"gpus": 4, "max_train_steps": 10, "save_every_n_steps": 3, "tier": "16G"}
    run, mark = create(tmp_path / "data", 0, fields), tmp_path / "mark"
    hang = {f"HANGPROOF_{name}": value for name, value in {**HANG, "FAULT_RANK": "1", "FAULT_MARK": str(mark)}.items()}
    env = environment(
        tmp_path / "data", HANGPROOF_QUIET="1", OMP_NUM_THREADS="1",
        WANDB_API_KEY="not-a-real-secret", NCCL_DEBUG="INFO", **hang,
    )  # fmt: skip

    def monitor(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "monitor", *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    assert monitor("start", str(run)).returncode == 0
    try:
        until = time.monotonic() + LIMIT_S
        while not mark.exists() and time.monotonic() < until:
            time.sleep(0.2)
        live = rank_report(run)
        while len([r for r in live["ranks"] if r["point"] == "first_step"]) < 3 and time.monotonic() < until:
            time.sleep(0.2)  # the others come to their first collective operation
            live = rank_report(run)
        assert live["verdict"]["kind"] == "progress" and live["verdict"]["rank"] is None, "nothing is suspected yet"
        assert [r["point"] for r in live["ranks"]] == ["first_step", "loader", "first_step", "first_step"]
        done = monitor("diagnose", str(run), "--json")
        assert done.returncode == 0, done.stderr
        text, found = done.stdout, json.loads(done.stdout.splitlines()[-1])
        said = found["rank_report"]["verdict"]
        assert (said["rank"], said["point"], said["number"]) == (1, "loader", 9), said
        assert "Rank 1 stopped at check point 9 (data loader and optimizer) and never reached the next one, 10" in text
        assert (
            "while ranks 0, 2 and 3 wait for it in a collective operation" in text and "0 data loader workers" in text
        )
        assert "lock_deadlock (" in text and "in all_reduce (distributed_c10d.py" in text, "the stacks, side by side"
        assert "WANDB_API_KEY=(set, hidden)" in text and "not-a-real-secret" not in text and "NCCL_DEBUG=INFO" in text
        assert "backend=gloo" in text and "device=cpu" in text
        assert all(f"rank {n}/4, local rank {n}" in text for n in range(4))
        assert all("not-a-real-secret" not in path.read_text("utf-8", "replace") for path in run.glob("*.json*"))
    finally:
        monitor("stop", "--now", "--wait", "60", str(run))
    assert not tree.with_environment(tree.RUN, str(run))
    assert rank_report(run) is None
