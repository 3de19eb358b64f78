"""The table of a trainer's options: listed as in its parser, validated by runs, stored in one field."""

import pytest
from checkout_helpers import parser_checkout

from runs.files import RunError
from runs.flags import known_flags
from runs.paths import CHECKOUTS
from ui.html import esc
from ui.new import flags, form, summary


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout in place of sd-scripts."""
    folder = parser_checkout(tmp_path / "checkout")
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    return folder


def values(**given) -> dict:
    return {**form.defaults(), "model": "flux-dev", "backend": "sd-scripts", "tier": "12G", **given}


def in_run(**given) -> dict[str, str]:
    """The values of the options in the command of a run."""
    return {name: value for name, *_, value in flags.rows(values(**given))}


def test_the_list_shows_the_values_of_this_run_and_which_values_are_valid(data, checkout):
    now = in_run()
    assert list(now) == sorted(now)
    assert now.pop("ae") and now.pop("output_dir").endswith("my-lora")
    of_the_run = {"network_dim": "4", "split_mode": "true", "optimizer_type": "adafactor", "guidance_scale": "1"}
    assert now == {**of_the_run, "log_level": "", "noise_offset": "", "betas": ""}
    assert in_run(tier="16G")["split_mode"] == ""
    mine = {"rank": 9, "flags": "guidance_scale=2.5", "sample_every_n_steps": 5}
    for trigger, rank, scale in (("cat", "9", "2.5"), ("", "4", "1")):  # nothing to draw
        now = in_run(**mine, trigger=trigger)
        assert (now["network_dim"], now["guidance_scale"]) == (rank, scale)
    shown = {name: more for name, *more in flags.rows(values())}
    assert shown["log_level"][:2] == ["Set it", "text: DEBUG, INFO"]
    assert shown["betas"][1] == "list of numbers" and shown["guidance_scale"][2] == "3.5"


def test_the_built_in_trainers_options_are_complete():
    known = known_flags("diffusers", "flux")
    assert set(in_run(backend="diffusers")) == set(known) and len(known) > 50


def test_a_real_checkouts_options_are_complete(data):
    if not (CHECKOUTS["sd-scripts"].path() / "flux_train_network.py").is_file():
        pytest.skip("no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts")
    listed = flags.rows(values())
    assert len(listed) == len(known_flags("sd-scripts", "flux")) > 150
    assert sum(bool(flags.JAPANESE.search(row[1])) for row in listed) < 10


def test_without_a_checkout_the_message_says_how_to_install_one(data, tmp_path, monkeypatch):
    for variable in ("SD_SCRIPTS_DIR", "MUSUBI_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    for given, message in (
        ({}, r"Run ./start.sh sd-scripts \(or set SD_SCRIPTS_DIR\)"),
        ({"model": "flux-dev2pro", "backend": "diffusers"}, "."),  # an unsupported pair
        ({"model": "z-image", "backend": "musubi"}, r"is not installed.*./start.sh musubi \(or set MUSUBI_DIR"),
    ):
        with pytest.raises(RunError, match=message) as error:
            flags.rows(values(**given))
        assert esc(error.value) in flags.markup(values(**given))


def test_each_line_is_judged_beside_the_field(mine, checkout):
    for line, expected in (
        ("--noise-offset=0.05\nbetas=0.9 0.99\nsplit_mode=yes\n\n", []),
        ("noise_ofset=0.05", ["did you mean noise_offset?"]),
        ("a=1\nnoise_offset=0.1\n\nbetas=x\nlog_level=<img>", ["a: ", "betas", "<img>"]),
        ("noise_offset=much\nsplit_mode=3\nbetas=[1", ["'much'", "split_mode", "JSON list"]),
    ):
        answer = summary.save_settings(mine, values(name="x", flags=line))
        texts = [text for _, text in answer["marks"].get("flags", [])]
        assert len(texts) == len(expected) and all(any(part in text for text in texts) for part in expected), texts


def test_the_table_is_searched_and_is_text(data, checkout, monkeypatch):
    monkeypatch.setattr(flags, "brief", lambda text: "<img src=x>")
    found = flags.markup(values(), "NETWORK dim")
    assert found.count("<tr>") == 2 and "network_dim" in found and "<img" not in found
    assert "No option has these words" in flags.markup(values(), "no such option")
