"""A script that a person edited is kept byte for byte, and changes only where the run itself changes."""

from pathlib import Path

import pytest
import tomllib
from hypothesis import given, settings, strategies as st
from runs_helpers import pictures

import runs
from runs import custom_script, folders, mitigate, pin
from runs.files import RunError
from runs.folders import render, train_longer, write_attempt
from runs.spec import dumps, load


def spec_of(**fields):
    fields = {"name": "cat", "model": "flux-dev", "backend": "sd-scripts", "tier": "12G", "trigger": "cat", **fields}
    return runs.make({"save_every_n_steps": 50, "sample_every_n_steps": 0, **fields})


def folder_of(spec):
    return runs.outputs_dir() / spec.slug


def generated(spec):
    return runs.script(spec, folder_of(spec))


def adopted(spec, change):
    """The spec with its script after `change`, and that script."""
    text = change(generated(spec))
    assert text != generated(spec)
    return pin.adopt(spec, text, folder_of(spec)), text


def flags_of(text):
    return custom_script.flags(custom_script.only(text))


OWN_LINES = "\n# mine: more open files\nulimit -n 4096\nexport MY_VARIABLE='a \"b\"'\n"


def edit(text):
    text = text.replace("set -eu\n", "set -eu" + OWN_LINES, 1)
    text = text.replace("--learning_rate 0.0008", "--learning_rate 0.002   ").replace("  --highvram \\\n", "")
    return text.replace("--max_data_loader_n_workers 2", "--max_data_loader_n_workers 4")


def test_an_edited_script_is_the_script_of_the_run_byte_for_byte(tmp_path, monkeypatch):
    spec, text = adopted(spec_of(), edit)
    assert generated(spec) == text
    assert (spec.learning_rate, spec.workers, spec.extra) == (0.002, 4, {"highvram": False}), "as the script says"
    assert runs.make(tomllib.loads(dumps(spec))) == spec
    for odd in (f"{text}# '''\n", f"\n{text}", f"{text}# '", f"{text}# \x1b\n"):
        other = spec.changed(edited=spec.edited.model_copy(update={"script": odd}))
        assert tomllib.loads(dumps(other))["edited"]["script"] == odd
    state = str(folder_of(spec) / "cat-step000050-state")
    again = runs.script(spec, folder_of(spec), Path(state))
    assert flags_of(again) == {**flags_of(text), "resume": [state]} and OWN_LINES in again, "a restart adds this only"
    with pytest.raises(RunError, match="Linux or macOS"):
        runs.script(spec, folder_of(spec), platform="win32")
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "other disk"))
    there = generated(spec)
    assert flags_of(there)["output_dir"] == [str(folder_of(spec))] and flags_of(there)["learning_rate"] == ["0.002"]
    assert OWN_LINES in there and str(Path(flags_of(text)["output_dir"][0])) not in there


def test_a_mitigation_changes_the_edited_script():
    more = "--highvram --blocks_to_swap 10 \\\n  --sdpa"
    spec, text = adopted(spec_of(), lambda text: edit(text).replace("--sdpa", more))
    for name, flag, value in (
        ("workers_0", "max_data_loader_n_workers", ["0"]),
        ("lower_lr", "learning_rate", ["0.001"]),
        ("no_block_swap", "blocks_to_swap", None),
        ("lean", "highvram", None),
    ):
        after, sentence = mitigate.apply(spec, name)
        assert sentence and flags_of(text)[flag] != value and flags_of(generated(after)).get(flag) == value
        assert OWN_LINES in generated(after)


def test_a_mitigation_that_cannot_change_the_script_is_left_out_and_says_why():
    def change(text):
        text = text.replace("set -eu\n", 'set -eu\nworkers="--max_data_loader_n_workers 4"\n')
        return text.replace("--max_data_loader_n_workers 2", "$workers")

    spec, _ = adopted(spec_of(), change)
    assert mitigate.apply(spec, "workers_0") == (spec, "")
    assert "--max_data_loader_n_workers is not written" in mitigate.refusal(spec, "workers_0")
    assert "checkpoints itself" in mitigate.refusal(spec, "save_local")


def test_a_longer_training_reaches_the_edited_script(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    spec = runs.make({"name": "cat", "model": "tiny-flux", "trigger": "cat", "epochs": 4, "save_every_n_steps": 5})
    spec, text = adopted(spec, lambda text: text.replace("set -eu\n", "set -eu" + OWN_LINES))
    folder = runs.create(spec, pictures(tmp_path / "in", 3))
    assert (folder / "train.sh").read_text() == text and load(folder) == spec
    train_longer(folder, 9)
    now = (folder / "train.sh").read_text()
    assert flags_of(now)["max_train_epochs"] == ["9"] and OWN_LINES in now
    path = write_attempt(folder, runs.pinned(folder), 2, folder / "cat-step000005-state")
    assert flags_of(path.read_text())["resume"] and OWN_LINES in path.read_text()
    assert render(folder).read_text() == now
    (folder / "train.sh").write_text(now.replace("epochs 9", "epochs 9 --max_train_steps 5"))
    train_longer(folder, 12)
    assert flags_of((folder / "train.sh").read_text())["max_train_epochs"] == ["12"], "which override the steps"
    folder = runs.create(spec.changed(name="dog", edited=None, max_train_steps=7), pictures(tmp_path / "in2", 3))
    now = (folder / "train.sh").read_text()
    (folder / "train.sh").write_text(now.replace("steps 7", "steps 7 --max_train_epochs 5"))
    monkeypatch.setattr(folders, "script_name", lambda: "train.bat")
    with pytest.raises(RunError, match="train.bat was edited by hand, and sets epochs"):
        train_longer(folder, 12)


def of_level(text, *levels):
    return [one for one in custom_script.problems(text, generated(spec_of())) if one.level in levels]


def test_what_start_refuses_has_a_line():
    for change, line_of, words in (
        (lambda t: t.replace("fi\n", "\n", 1), None, "bash:"),
        (lambda t: "echo nothing\n", None, "no trainer that Hangproof knows"),
        (lambda t: t + t, None, "2 training commands"),
        (lambda t: t.replace("_dir ", "_dir /elsewhere"), "--output_dir", "--output_dir is /elsewhere"),
        (lambda t: t.replace("as safetensors", "as ckpt"), "as ckpt", "--save_model_as is ckpt"),
        (lambda t: t.replace("flux_train", "sdxl_train"), "sdxl_train", "need flux_train_network.py"),
        (lambda t: t.replace("-m sd_scripts_patches ", ""), "flux_train", "Without guards"),
        (lambda t: t + "\0", None, "NUL"),
    ):
        text = change(generated(spec_of()))
        found = of_level(text, "error")
        assert found and words in found[0].text and found[0].advice
        if line_of:
            assert line_of in text.splitlines()[found[0].line - 1]
        with pytest.raises(RunError, match="script"):
            pin.adopt(spec_of(), text, folder_of(spec_of()))


def test_bash_reads_a_script_and_executes_nothing_of_it(tmp_path, monkeypatch):
    flag = tmp_path / "executed"
    (tmp_path / "rc").write_text(f"touch {flag}\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "rc"))
    text = f"touch {flag}\n$(touch {flag})\n" + generated(spec_of())
    assert not of_level(text, "error") and not flag.exists()


VALUE = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), VALUE), max_size=6))
def test_no_edit_is_worse_than_a_clear_message_and_an_accepted_one_stays(tmp_path_factory, edits):
    spec = spec_of()
    lines = generated(spec).splitlines(keepends=True)
    for at, text in edits:
        lines.insert(min(at, len(lines)), text + "\n")
    text = "".join(lines)
    try:
        after = pin.adopt(spec, text, folder_of(spec))
    except RunError as error:
        assert str(error).strip()
        return
    assert generated(after) == text
    assert runs.make(tomllib.loads(dumps(after))) == after
    resumed = runs.script(after, folder_of(spec), folder_of(spec) / "cat-step000050-state")
    kept = [line for line in text.splitlines() if not line.rstrip().endswith("\\")][:5]
    assert all(line in resumed for line in kept) and "cat-step000050-state" in resumed
