"""The fixes of lint on scripts that people have: other projects' documented commands, FluxGym's scripts, kohya_ss's.

Each script is fixed and run in bash; it must start the same programs with the same arguments, apart from the changes
that lint reports. Batch files and PowerShell scripts are compared by the parser, because neither interpreter is here.
"""

import re
import time

import pytest
from cmd_words import cmd_words
from lint_corpus import CORPUS, SUPPORTED, Started, announced, corpus_text, fluxgym, hold, lint, stand_ins

from presets import PresetError
from presets.fix import set_flags
from presets.training import trainings
from runs import custom_script

IN_BASH = [entry for entry in SUPPORTED if entry["language"] == "sh"]
OTHERS = [entry for entry in CORPUS["command"] if entry["source"] == "kohya-ss/musubi-tuner"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return stand_ins(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize(("number", "entry"), list(enumerate(IN_BASH)))
def test_a_documented_command_starts_the_same_after_the_fix(tmp_path, programs, number, entry):
    value = hold(tmp_path, programs, corpus_text(entry, ["\n", "", " \\\n", " \\", "\r\n"][number % 5]))
    left = {finding["id"] for finding in value["findings"]}
    assert left == ({"cut-off"} if entry["layout"] == "not continued" else set())
    assert len(value["started"]) == 1


def test_a_command_of_another_trainer_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(corpus_text(OTHERS[0]))
    before = path.read_bytes()
    code, printed, value = lint(path, "--fix")
    assert code == 1 and "no training command found" in printed and not value and path.read_bytes() == before


def batch_words(text: str) -> list[str]:
    """What the last command of a batch file starts, without presets.windows; its variables are PYTHONPATH's alone."""
    return cmd_words(re.sub(r"\^\r?(\n|\Z)", "", text).rstrip().rpartition(" && ")[2])


ADVANCED = ["--blocks_to_swap 18", "--save_state", "--log_with wandb", "--fused_backward_pass", "--noise_offset 0.1"]


@pytest.mark.parametrize("windows", [False, True], ids=["sh", "bat"])
@pytest.mark.parametrize(
    "tier, advanced, samples",
    [("20G", [], True), ("16G", ADVANCED[:1], False), ("12G", ADVANCED, True), ("12G", [], False)],
)
def test_a_script_of_fluxgym_starts_the_same_after_the_fix(tmp_path, programs, tier, advanced, samples, windows):
    text = fluxgym(tier, samples, advanced, windows)
    assert text.endswith(("l2 \\", "l2 ^")) != bool(advanced)
    value = hold(tmp_path, programs, text, "train.bat" if windows else "train.sh")
    assert value["clean"] and value["text"].endswith(("\\", "^")) != bool(advanced)
    assert len(value["started"]) == 1 and all(word.strip() for word in value["started"][0].words)
    if windows:
        before, after = batch_words(text), batch_words(value["text"])
        assert after[1:] == announced(Started(before[0], "", before[1:]), value["changes"]).words


@pytest.mark.parametrize(
    "folder, script, launch",
    [("/kohya_ss", "sdxl_train_network.py", ""), ("/my own tools/kohya_ss", "train_db.py", "--multi_gpu")],
)
def test_a_command_of_the_kohya_ss_gui_starts_the_same_after_the_fix(tmp_path, programs, folder, script, launch):
    """It prints words without quotes: github.com/bmaltais/kohya_ss kohya_gui/common_gui.py:1760 at 45088f0."""
    options = f"--mixed_precision fp16 --num_processes 1 --num_machines 1 --num_cpu_threads_per_process 2 {launch}"
    text = f"{programs}/accelerate launch {options} {folder}/sd-scripts/{script} --config_file config_lora.toml\n"
    config = 'blocks_to_swap = 4\nmax_data_loader_n_workers = 8\nsave_every_n_epochs = 1\noutput_dir = "/o"\n'
    (tmp_path / "config_lora.toml").write_text(config + "cache_latents = true\n")
    value = hold(tmp_path, programs, text)
    assert {one["id"] for one in value["findings"]} == {"block-swap"} and "-m" in value["started"][0].words


TRICKY = CORPUS["tricky"]  # each starts what it started before


@pytest.mark.parametrize("case", TRICKY)
def test_a_tricky_script_starts_the_same_after_the_fix(tmp_path, programs, case):
    (tmp_path / "a.py").write_text("")
    value = hold(tmp_path, programs, TRICKY[case])
    assert value["started"] or case == "an open quote"
    if case == "a script that only names another":
        assert value["text"].splitlines()[:-1] == TRICKY[case].splitlines()[:-1]


def test_a_link_to_a_script_stays_a_link(tmp_path):
    (tmp_path / "real.sh").write_text("accelerate launch sd/flux_train_network.py --blocks_to_swap 3\n")
    (tmp_path / "link.sh").symlink_to("real.sh")
    assert lint(tmp_path / "link.sh", "--fix")[0] == 0
    assert (tmp_path / "link.sh").is_symlink() and "blocks_to_swap" not in (tmp_path / "real.sh").read_text()


def test_flags_are_set_and_removed_wherever_they_are():
    text = "accelerate launch flux_train_network.py --a 1 --list x y z --seed 5 \\\n  --a 2 --sw\n"
    new, refused = set_flags(text, {"a": ["3 4"], "list": ["q"], "seed": None, "sw": None, "new": []})
    assert not refused
    assert custom_script.flags(trainings(new)[0]) == {"a": ["3 4"], "list": ["q"], "new": []}
    with pytest.raises(PresetError, match="training commands"):
        set_flags("echo", {"a": []})


def test_a_flag_is_removed_from_a_script_of_spaces_in_a_moment():
    blank, command = f"#{' ' * 40_000}x\n", "accelerate launch flux_train_network.py --seed 5 --a 1\n"
    began_s = time.process_time()
    assert set_flags(blank + command, {"seed": None}) == (blank + command.replace(" --seed 5", ""), [])
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize("value", ['a"&calc', 'say "50 %" ^ (x)', "C:\\a b\\", "写真 & more", '"'])
def test_a_value_that_is_set_in_a_batch_file_reaches_the_program_as_it_is(value):
    new, _ = set_flags("accelerate launch flux_train_network.py --seed 5\r\n", {"name": [value]}, "train.bat")
    assert cmd_words(new.strip())[-2:] == ["--name", value]
    assert custom_script.flags(trainings(new, "train.bat")[0])["name"] == [value]
