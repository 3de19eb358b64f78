"""The monitor on real processes: a toy trainer that hangs, dies or is stopped (tests/campaigns/faults.toml: all)."""

import sys

import pytest
from monitor_helpers import events, supervise, toy_run
from run_facts import completed, incidents, report, status
from toys import AT, HANG, SHORT, fault_at

from monitor.ledger import Ledger

pytestmark = pytest.mark.slow


def test_an_undisturbed_run_completes_with_exit_code_0_and_no_incident(folder):
    toy_run(folder, **SHORT)
    note = "the tracker did not finish: waited 30 s for wandb to finish"
    text = (folder / "toy.py").read_text()
    (folder / "toy.py").write_text(text.replace('hb.end("done")', f'hb.end("done", "{note}")'))
    assert supervise(folder)[0] == 0
    now = completed(folder)
    assert now["reason"].endswith(f"LoRA: toy.safetensors; {note}"), "with what the training reported"
    assert now["planned_steps"] == 50 and now["checkpoint"]["step"] == 50 and now["incidents"] == 0
    assert now["lora"] == str(folder / "toy.safetensors")
    assert incidents(folder) == []
    assert events(folder)[0]["kind"] == "started"
    assert not list((folder.parent / "tmp").glob("hangproof-toy-*")), "heartbeats are removed at the end"


@pytest.mark.journey
def test_a_step_that_hangs_is_found_ended_and_resumed_with_the_result_of_a_calm_run(folder):
    """test_machines.py has one that is stopped."""
    toy_run(folder, HANG, **SHORT)
    code, output, _ = supervise(folder)
    assert code == 0
    completed(folder, restarts=1)
    (incident,) = incidents(folder)
    assert incident["kind"] == "hang" and incident["phase"] == "step" and incident["step"] == AT
    assert incident["resumed_from"] == 30 and incident["steps_repeated"] == AT - 30
    assert incident["recover_s"] > incident["detect_s"]
    assert incident["cause"] == "stuck"
    (event,), found = events(folder, "ledger"), Ledger.of(status(folder))
    assert f"toy: {event['message']}" in output.splitlines()
    assert (found.steps, found.repeated, found.failures, found.recovered) == (50, AT - 30, 1, 1)
    assert found.seconds["lost"] >= incident["detect_s"] and found.seconds["recovering"] > 0
    text = report(folder)
    assert f"step {AT} of 50" in text and "checkpoint of step 30" in text and "## Cost" in text
    assert "fault" in (folder / "incidents/0001/stacks.txt").read_text()


@pytest.mark.journey
def test_a_death_by_sigkill_is_a_crash_even_below_a_living_launcher(folder):
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    (folder / "train.sh").write_text(f"cd {folder}\n{sys.executable} toy.py || sleep 3600\n")
    assert supervise(folder, limits="[watch]\nlauncher_s = 1\n")[0] == 0
    completed(folder, restarts=1)
    (incident,) = incidents(folder)
    assert incident["kind"] == "crash"


def test_a_script_without_heartbeats_is_watched_by_its_log(folder):
    folder.mkdir()
    (folder / "train.sh").write_text(
        'for i in 1 2 3; do echo "line $i of attempt $HANGPROOF_ATTEMPT"; sleep 0.3; done\n'
        '[ "$HANGPROOF_ATTEMPT" = 1 ] && sleep 3600\necho done\n'
    )
    assert supervise(folder, limits="[watch]\nlog_silence_s = 2\n")[0] == 0
    now = status(folder)
    assert now["state"] == "completed" and now["restarts"] == 1
    (incident,) = incidents(folder)
    assert incident["kind"] == "hang" and incident["detect_s"] >= 2
    assert "line 3 of attempt 1" in (folder / "incidents/0001/log_tail.txt").read_text()
