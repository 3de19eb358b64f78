"""How an attempt ended: which exit codes and outcomes count as done."""

from monitor.diagnose.collect import ExitStatus


def test_exit_codes_and_outcomes():
    def done(*status):
        return ExitStatus(*status).done(foreign=False, killed=False)

    assert done(0, None, "", "", False), "a script without heartbeats"
    assert not done(0, None, "running", "", False), "exit code 0 alone does not count"
    assert done(1, None, "done", "", True), "a launcher's code is only a hint"
    assert "SIGKILL" in str(ExitStatus(137, 9, "running", "", False))
    assert "waited for a batch" in str(ExitStatus(75, None, "deadline", "waited for a batch", False))
