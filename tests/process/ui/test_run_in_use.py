"""A run's folder stays while a command of the page, such as a publication, works in it."""

import os

import pytest
from ui_helpers import write_run

from runs import manage
from runs.files import RunError
from ui import jobs

WORKS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\n"


def test_a_run_is_not_deleted_while_a_command_works_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    (tmp_path / "publish_stand_in.py").write_text(WORKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    folder = write_run(tmp_path, "cat", state="completed")
    jobs.start(folder, "publish", ["publish_stand_in", str(tmp_path / "go")], 120)
    with pytest.raises(RunError, match="'publish' is working in cat; cancel it, or wait until it has ended"):
        manage.delete("cat", jobs.idle)
    assert (folder / "run.toml").is_file()
    (tmp_path / "go").touch()
    assert jobs.wait(folder, "publish", 60).state == "done"
    manage.delete("cat", jobs.idle)
    assert not folder.exists()
