"""Each patch finds what it follows in every pinned version of kohya's trainers, as recorded (tests/support/record_shapes.py).

The patches' own check runs on checkouts that have the recorded names, signatures and outlines and no code. On the real
ones, tests/upstream/sd_scripts_patches/test_compatibility.py compares the record with them.
"""

import dataclasses
import json

import pytest
import record_shapes

from sd_scripts_patches import compatibility, registry

RECORDED = {f"{facts['trainer']} {facts['version']}": facts for facts in record_shapes.load()}


def findings(facts, folder):
    """The verdicts of all targets in the checkout; checks that read code of a function are left out, as there is none."""
    found = []
    for patch in registry.patches(facts["trainer"]):
        targets = tuple(dataclasses.replace(target, check=None) for target in patch.targets)
        found += compatibility.check_patch(dataclasses.replace(patch, targets=targets), folder).targets
    return found


@pytest.fixture(scope="module", params=RECORDED)
def checkout(request, tmp_path_factory):
    """(facts, a checkout made of them)"""
    facts = RECORDED[request.param]
    return facts, record_shapes.write_checkout(facts, tmp_path_factory.mktemp("shapes"))


def test_every_patch_finds_its_targets_with_the_parameters_that_it_uses(checkout):
    facts, folder = checkout
    found = findings(facts, folder)
    assert [finding for finding in found if finding.verdict in compatibility.OPEN] == []
    rewritten = [finding.place for finding in found if finding.target.endswith("(rewritten)")]
    assert len(rewritten) >= 2 and all(rewritten)


def test_a_name_or_a_parameter_that_changes_is_found(checkout):
    """Each recorded function in turn under another name, and with another first parameter where the guard names it."""
    facts, folder = checkout
    changed = 0
    for target in (target for patch in registry.patches(facts["trainer"]) for target in patch.targets if target.params):
        target = dataclasses.replace(target, check=None)
        module, _, name = compatibility.check_target(target, folder).place.partition(":")
        if module not in facts["modules"]:
            continue  # of an installed package, or of a family that this version lacks
        path, name = folder.joinpath(*module.split(".")).with_suffix(".py"), name.rpartition(".")[2]
        text = path.read_text()
        for other, expected in ((f"{name}_v2(", compatibility.MISSING), (f"{name}(other, ", compatibility.CHANGED)):
            path.write_text(text.replace(f"def {name}(", f"def {other}"))
            assert compatibility.check_target(target, folder).verdict == expected, (target, other)
            path.write_text(text)
            changed += 1
    assert changed > 50


def test_a_statement_that_a_rewrite_looks_for_and_that_changes_is_found(checkout, tmp_path):
    facts, _ = checkout
    changed = json.loads(json.dumps(facts))
    for shapes in changed["modules"].values():
        shapes["outline"] = [line.replace("global_step += 1", "steps += 1") for line in shapes.get("outline", [])]
    found = findings(facts, record_shapes.write_checkout(changed, tmp_path))
    reasons = [finding.reason for finding in found if finding.verdict in compatibility.OPEN]
    assert reasons and all("the statement 'global_step += 1': expected exactly one, found 0" in one for one in reasons)
