"""The patches and the real checkouts; tests/unit/sd_scripts_patches/test_shapes.py changes what they follow."""

import json

import record_shapes

from sd_scripts_patches import __main__ as main, registry, versions


def test_every_patch_is_compatible_with_the_pinned_checkout(sd_scripts, capsys):
    assert main.check([str(sd_scripts), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    verdicts = {p["patch"]: p["verdict"] for p in answer["patches"]}
    assert answer["ok"]
    assert set(verdicts) == set(registry.NAMES)
    assert set(verdicts.values()) <= {"guarded", "moved"}, verdicts
    for finding in answer["patches"]:
        assert finding["why"] and finding["targets"], finding


def test_what_is_recorded_is_what_the_checkouts_have(sd_scripts, musubi):
    """After another pin: python -m tests.support.record_shapes CHECKOUT…"""
    for checkout in (sd_scripts, musubi):
        recorded = [facts for facts in record_shapes.load() if facts["commit"] == versions.commit(checkout)]
        assert [record_shapes.record(checkout)] == recorded


def test_every_patch_of_musubi_tuner_is_compatible(musubi, capsys):
    assert main.check([str(musubi)]) == 0
    table = capsys.readouterr().out
    assert f"{len(registry.MUSUBI_NAMES)} patches checked with {musubi}: " in table
    assert ", 0 moved, 0 changed, 0 missing, 0 not needed" in table
