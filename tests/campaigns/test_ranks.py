"""Real gloo ranks under the real monitor: one hangs, is named with its place, and the run finishes with the undisturbed LoRA.

python -m pytest tests/campaigns/test_ranks.py          4 minutes
python -m benchmarks ranks                              the complete form
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import ranks
from benchmarks.faults_reference import create, environment
from monitor.cli.commands import rank_report
from monitor.process import tree

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500


def test_diagnose_shows_the_rank_report_of_a_run_whose_rank_hangs(tmp_path):
    run, mark = create(tmp_path / "data", 0, ranks.SPEC), tmp_path / "mark"
    env = environment(
        tmp_path / "data", ACCELERATE=str(ranks.launcher(tmp_path)), HANGPROOF_INJECT="benchmarks.ranks_group:fire",
        HANGPROOF_LIMITS=str(ranks.limits_file(tmp_path, 120.0)), HANGPROOF_HANG="1:loader:lock",
        HANGPROOF_MARK=str(mark), HANGPROOF_QUIET="1", WANDB_API_KEY="not-a-real-secret", NCCL_DEBUG="INFO",
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
        assert "    lock (" in text and "in all_reduce (distributed_c10d.py" in text, "the stacks, side by side"
        assert "WANDB_API_KEY=(set, hidden)" in text and "not-a-real-secret" not in text and "NCCL_DEBUG=INFO" in text
        assert "backend=gloo" in text and "device=cpu" in text
        assert all(f"rank {n}/4, local rank {n}" in text for n in range(4))
        assert all("not-a-real-secret" not in path.read_text("utf-8", "replace") for path in run.glob("*.json*"))
    finally:
        monitor("stop", "--now", "--wait", "60", str(run))
    assert not tree.with_environment(tree.RUN, str(run))
    assert rank_report(run) is None
