"""The messages that people get of a run, and the file with their addresses."""

import json

import pytest
from loopback import answering
from monitor_helpers import supervise, toy_run, wait_for
from toys import HANG, SHORT

from monitor.cli import notify


@pytest.mark.slow
def test_people_are_notified_of_a_hang_and_of_the_end_and_their_addresses_stay_secret(folder):
    """A server that keeps what it is sent stands in for a chat service."""
    got, config = [], folder.parent / "notify.toml"
    toy_run(folder, HANG, **SHORT)
    with answering(lambda request: got.append(request.body.decode()) or (200, "")) as server:
        config.write_text(f'urls = ["json://user:s3cr3t-token@127.0.0.1:{server.server_port}/"]\n')
        config.chmod(0o600)
        assert supervise(folder, HANGPROOF_NOTIFY=str(config))[0] == 0
        wait_for(lambda: len(got) >= 3)  # a helper that has begun to send goes on without the monitor
    assert sorted(json.loads(text)["title"] for text in got) == ["toy: completed", "toy: hang", "toy: restarted"]
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cr3t-token" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [('urls = ["json://s3cr3t"]\n', 0o644, "chmod 600"), ("urls = [json://s3cr3t", 0o600, "not a TOML file")],
)
def test_a_notification_file_that_is_refused_is_not_shown(tmp_path, text, mode, problem):
    config = tmp_path / "notify.toml"
    config.write_text(text)
    config.chmod(mode)
    with pytest.raises(notify.MonitorError, match=problem) as refused:
        notify.read_config(config)
    assert "s3cr3t" not in str(refused.value)
