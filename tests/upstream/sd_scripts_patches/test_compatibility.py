"""The patches and the real checkouts; tests/unit/sd_scripts_patches/test_shapes.py changes what they follow."""

import json

import record_shapes

from sd_scripts_patches import __main__ as main, versions


def test_every_patch_is_compatible_and_what_is_recorded_is_what_the_checkouts_have(sd_scripts, musubi, capsys):
    """After another pin: python -m tests.support.record_shapes CHECKOUT…"""
    for checkout in (sd_scripts, musubi):
        recorded = [facts for facts in record_shapes.load() if facts["commit"] == versions.commit(checkout)]
        assert [record_shapes.record(checkout)] == recorded
        assert main.check([str(checkout), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert answer["ok"] and {patch["verdict"] for patch in answer["patches"]} <= {"guarded", "moved"}
