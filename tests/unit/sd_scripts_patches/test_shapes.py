"""Each patch finds what it follows in every pinned version of kohya's trainers, as record_shapes.py recorded it.

The patches' own check runs on checkouts that have the recorded outlines and no code. On the real ones,
tests/upstream/sd_scripts_patches/test_compatibility.py compares the record with them.
"""

import ast
import dataclasses
import re

import pytest
import record_shapes

from sd_scripts_patches import compatibility, locate, registry
from sd_scripts_patches.patch import find_function
from sd_scripts_patches.trainers import TRAINERS

RECORDED = {f"{facts['trainer']} {facts['version']}": facts for facts in record_shapes.load()}


def patches(facts):
    """The patches without the checks that read code of a function, as there is none."""
    for one in registry.patches(facts["trainer"]):
        yield dataclasses.replace(one, targets=tuple(dataclasses.replace(target, check=None) for target in one.targets))


def findings(facts, folder):
    """The verdicts of all targets in the checkout."""
    return [finding for one in patches(facts) for finding in compatibility.check_patch(one, folder).targets]


@pytest.fixture(scope="module", params=RECORDED)
def checkout(request, tmp_path_factory):
    """(facts, a checkout made of them)"""
    facts = RECORDED[request.param]
    return facts, record_shapes.write_checkout(facts, tmp_path_factory.mktemp("shapes"))


def test_every_pinned_version_is_recorded():
    commits = {facts["commit"] for facts in RECORDED.values()}
    assert {trainer.commit for trainer in TRAINERS.values()} < commits and len(commits) == 3


def test_every_patch_finds_its_targets_with_the_parameters_that_it_uses(checkout):
    facts, folder = checkout
    found = findings(facts, folder)
    assert [finding for finding in found if finding.verdict in compatibility.OPEN] == []
    names = registry.MUSUBI_NAMES if facts["trainer"] == compatibility.MUSUBI else registry.NAMES
    assert [one.name for one in patches(facts)] == list(names)
    table = compatibility.format_table([compatibility.check_patch(one, folder) for one in patches(facts)])
    assert table.encode("cp1252"), "what a program on Windows may write into a pipe or a file"
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


def test_a_statement_or_a_variable_that_a_rewrite_relies_on_and_that_changes_is_found(checkout):
    """Each recorded statement of a rewritten function in turn is another one, and each variable has another name."""
    facts, folder = checkout
    rewrites = [one for patch in registry.patches(facts["trainer"]) for one in patch.rewrites]
    said = []
    for source in {locate.find_source(locate.locate(target, folder).module, folder) for target, _ in rewrites}:
        text = source.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Expr, ast.AugAssign, ast.Assign, ast.For)):
                lines = text.splitlines()
                other = "for _ in _:" if isinstance(node, ast.For) else "other()"
                lines[node.lineno - 1] = " " * node.col_offset + other
                source.write_text("\n".join(lines))
                found = [compatibility.check_rewrite(target, rewrite, folder, "") for target, rewrite in rewrites]
                reasons = [one.reason for one in found if one.verdict in compatibility.OPEN]
                expected = ": expected exactly one, found 0| has no variable "
                assert reasons and all(re.search(expected, reason) for reason in reasons)
                said += reasons
        source.write_text(text)
    assert len(set(said)) > 10, said


def test_the_trackers_end_after_the_last_save_or_the_training_is_refused(checkout):
    facts, folder = checkout
    ((target, rewrite),) = next(one.rewrites for one in registry.patches(facts["trainer"]) if one.name == "save")
    source = locate.find_source(locate.locate(target, folder).module, folder)
    last = find_function(rewrite(locate.parse_uncached(source)), target.name).body[-1]
    assert ast.unparse(last) == "_hangproof_end(accelerator)"
    text = source.read_text()
    source.write_text(text.replace("accelerator.end_training()", "if _: accelerator.end_training()"))
    assert "is not before the last save" in compatibility.check_rewrite(target, rewrite, folder, "").reason
    source.write_text(text)


def test_a_missing_family_is_not_needed(checkout, tmp_path):
    folder = record_shapes.write_checkout(checkout[0], tmp_path)
    gone = [*folder.rglob("*anima*.py"), *folder.rglob("*lumina*.py")]
    for path in gone:
        path.unlink()
    verdicts = {one.target: one.verdict for one in findings(checkout[0], folder)}
    assert not {*verdicts.values()} & {*compatibility.OPEN}
    needless = [target for target, verdict in verdicts.items() if verdict == compatibility.NOT_NEEDED]
    assert any("library.strategy_anima:" in target for target in needless) == bool(gone)


def test_a_run_that_relies_on_a_missing_target_is_refused(checkout, tmp_path):
    """Another run starts and names it: test_main.py."""
    facts, folder = checkout[0], record_shapes.write_checkout(checkout[0], tmp_path)
    (path,) = folder.rglob("custom_offloading_utils.py")
    path.write_text(path.read_text().replace("_wait_blocks_move", "_await_block"))
    for arguments, strict in ((["--blocks_to_swap=4"], False), ([], True)):
        said, spared = compatibility.refusal([*patches(facts)], folder, arguments, strict)
        assert "missing     block_swap" in said and "'_wait_blocks_move' is missing" in said and not spared
        assert "! open: a swap thread that is stuck on a CUDA stream" in said and "Nothing was loaded" in said
