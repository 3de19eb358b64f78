"""Shared by the tests of imports from other trainers: their configurations, and a configuration as a run."""

import json

from runs_helpers import PROJECT

from runs.foreign import read
from runs.foreign_settings import Row, Settings
from runs.foreign_spec import convert


def example(name: str) -> str:
    """The text of a configuration as another program writes it."""
    return (PROJECT / "tests/support/data/foreign" / name).read_text(encoding="utf-8")


GUI = json.loads(example("kohya_ss.json"))


def imported(*texts: tuple[str, str], tier: str = "") -> Settings:
    """Files (name, text) as a run."""
    return convert(read([(name, text) for name, text in texts]), tier)


def row(one: Settings, name: str) -> Row:
    """What became of a setting."""
    found = [r for r in one.rows if r.name in (name, f"--{name}")]
    assert len(found) == 1, (name, found)
    return found[0]
