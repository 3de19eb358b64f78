"""The monitor's limits: units, files that replace them, and the guards' limits that raise them."""

import re

import pytest

from guards.heartbeat import PHASES
from monitor import config
from runs.paths import ROOT


def test_every_limit_that_the_code_reads_is_in_the_table_and_every_one_of_the_table_is_read():
    files = [*(ROOT / "monitor").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    sections = {name: vars(section) for name, section in vars(config.load()).items() if hasattr(section, "__dict__")}
    for name, key in re.findall(rf"\b(?:config|limits)\.({'|'.join(sections)})\.(\w+)", text):
        assert key in sections[name], f"{name}.{key}"
    for key in (key for section in sections.values() for key in section):
        assert f".{key}" in text and key.endswith(("_s", "_count", "_bytes")), key


def test_every_phase_has_limits_floors_are_below_ceilings_and_a_pre_emption_fits_into_its_total():
    loaded = config.load()
    assert tuple(loaded.phases) == PHASES
    assert all(phase.floor_s <= phase.ceiling_s for phase in loaded.phases.values())
    end = loaded.end
    assert end.preempt_save_s + end.preempt_grace_s + end.preempt_kill_s <= end.preempt_total_s - 2


def test_a_limit_that_a_training_has_set_raises_what_encloses_it():
    loaded = config.load(environ={"HANGPROOF_UPLOAD_EXIT_S": "5000"})
    end = loaded.phases["end"]
    assert end.ceiling_s >= end.floor_s >= 5000, "the ceiling is raised with the floor"
    config.enclose(loaded, {"HANGPROOF_BARRIER_TIMEOUT_S": "7300.5", "HANGPROOF_NPZ_TIMEOUT_S": "no number"})
    assert loaded.watch.between_steps_s == 7305.5


def test_a_file_replaces_values_but_not_below_the_guards(tmp_path, monkeypatch):
    path = tmp_path / "limits.toml"
    text = "[watch]\nexit_s = 1\nlauncher_s = 9\n[phases.sample]\nfloor_s = 70\n[restart]\nin_all_count = 3\n"
    path.write_text(text, encoding="utf-8-sig")  # as PowerShell writes it
    monkeypatch.setenv("HANGPROOF_LIMITS", str(path))
    loaded = config.load()
    assert (loaded.watch.launcher_s, loaded.restart.in_all_count, loaded.phases["sample"].floor_s) == (9, 3, 70)
    assert loaded.watch.exit_s == config.minimums()["watch.exit_s"]
    path.write_text("allow_below_guards = true\n" + text)
    loaded = config.load()
    config.enclose(loaded, {})
    assert loaded.watch.exit_s == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[watch]\nexit = 3", "unknown key watch.exit. Remove it, or use a key of "),
        ("[wacht]\nexit_s = 3", "unknown key wacht"),
        ("[phases.steps]\nfloor_s = 3", "unknown key phases.steps"),
        ("[end]\ngrace_s = -1", "Use a number of seconds, 0 or more"),
        ("[end]\ngrace_s = nan", "Use a number of seconds"),
        ("[end]\ngrace_s = true", "Use a number of seconds"),
        ("[restart]\nin_all_count = 1.5", "Use an integer"),
        ("[check]\nlog_tail_bytes = 1e3", "Use a number of bytes"),
        ("[end", "cannot read it"),
        (None, "unset HANGPROOF_LIMITS"),  # it is missing
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_the_fix(tmp_path, text, message):
    path = tmp_path / "limits.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(config.ConfigError, match=re.escape(message)) as caught:
        config.load(path)
    assert str(path) in str(caught.value)
