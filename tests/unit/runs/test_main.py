"""The command `python -m runs` in this process."""

import json
from pathlib import Path

import pytest
from runs_helpers import call, pictures


def test_the_command_line_makes_shows_and_renders(tmp_path, data):
    images = pictures(tmp_path / "in")
    assert call("runs", "show").stdout == f"no runs in {data / 'outputs'}\n"
    made = call(
        "runs", "new", "--name", "cli run", "--images", str(images), "--trigger", "ohwx", "--model", "FLUX.1-schnell",
        "--tier", "20G+", "--backend", "diffusers", "--prompt", "one", "--prompt", "two --w 128", "--set", "rank=16",
        "--set", "network_dropout=0.1", "--set", "sample_every_n_steps=4", "--set", "highvram=false",
        "--set", "network_args=train_blocks=double split_qkv=False", "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    folder = Path(json.loads(made.stdout.splitlines()[-1])["folder"])
    assert folder == data / "outputs/cli-run" and made.stdout.splitlines()[0] == str(folder)
    script = (folder / "train.sh").read_text()
    for line in ("--network_dim 16", "--network_dropout 0.1", "--network_args train_blocks=double split_qkv=False"):
        assert f"  {line} \\\n" in script or f"  {line}\n" in script
    assert "--highvram" not in script and "black-forest-labs/FLUX.1-schnell" in script
    prompts = "one --w 512 --h 512 --s 20 --d 42\ntwo --w 128 --h 512 --s 20 --d 42\n"
    assert (folder / "sample_prompts.txt").read_text() == prompts
    shown = call("runs", "show", "cli run", "--json")
    assert json.loads(shown.stdout.splitlines()[-1])["spec"]["rank"] == 16
    shown, last = call("runs", "show", "--json").stdout.splitlines()
    assert shown == str(folder) and json.loads(last) == {"runs": [str(folder)]}
    missing = call("runs", "show", "dog")
    assert missing.returncode == 1 and "dog" in missing.stderr
    assert call("runs", "render", "cli-run").stdout.strip() == str(folder / "train.sh")
    assert "sample images are turned off" not in made.stderr
    more = ("--model", "tiny-flux", "--backend", "diffusers", "--prompt", "one")
    without = call("runs", "new", "--name", "quiet", "--images", images, *more)
    assert without.returncode == 0 and "sample images are turned off; turn them on with --set" in without.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--name", "x", "--set", "rnak=3"], 1, "did you mean"),
        (["--name", "x", "--set", "rank"], 1, "KEY=VALUE"),
        (["--name", "x", "--tier", "8G"], 1, "tier"),
        (["--name", "x", "--model", "flux-devv"], 1, "did you mean flux-dev"),
        ([], 2, "--name"),
    ],
)
def test_wrong_words_are_refused_by_name(tmp_path, data, words, code, says):
    done = call("runs", "new", "--images", pictures(tmp_path / "in"), *words)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert not list(data.glob("*/*"))
