"""The tables, and the flags that are read from the trainers' sources."""

import json
from pathlib import Path

import pytest
from runs_helpers import call

import presets
from presets import schema


def test_every_model_file_can_be_downloaded_or_is_generated():
    for key, model in presets.models().items():
        by_file = [b for b in model["backends"] if presets.backends()[b]["loads"] == "files"]
        for backend in by_file:
            needs = presets.trainer_of(key, backend)["needs"]
            assert set(model["files"]) <= set(needs) and set(needs) - set(model["files"]) <= {"base_weights"}, key
        if not model["generated"]:
            files = [shard for name in model["files"].values() for shard in presets.tables.shards(name)]
            sources = {name: presets.tables.downloads()[name] for name in files}
            assert all(one["repo"].count("/") == 1 and one["path"] and one["size"] > 1e8 for one in sources.values())
        assert model["licence"] not in ("", "unknown") and model["name"] and model["note"].endswith(".")


def test_a_file_in_several_parts_is_downloaded_as_a_whole():
    names = presets.tables.shards("qwen_3_8b-00001-of-00004.safetensors")
    assert names[3] == "qwen_3_8b-00004-of-00004.safetensors" and len(names) == 4
    for n, name in enumerate(names, 1):
        assert presets.tables.downloads()[name]["path"] == f"text_encoder/model-{n:05d}-of-00004.safetensors"
    assert presets.tables.shards("ae.safetensors") == ["ae.safetensors"]


def test_the_users_models_are_read_again_when_they_change(tmp_path):
    file = tmp_path / "models.toml"
    assert "mine" not in presets.models(file)
    for repo in ("me/mine", "me/other"):
        file.write_text(f'[models.mine]\nrepo = "{repo}"\n[models.flux-dev]\nrepo = "{repo}"\n')
        assert presets.models(file)["mine"]["repo"] == presets.models(file)["flux-dev"]["repo"] == repo


def test_list_prints_tiers_and_models():
    done = call("presets", "list", "--json")
    value = json.loads(done.stdout.splitlines()[-1])
    assert list(value["tiers"]) == ["8G", "12G", "16G", "20G"] and "tiny-flux" in value["models"]
    row = value["tiers_of"]["z-image"]["musubi"]["8G"]
    assert row["needs_gb"] <= 8 and row["basis"] and row["source"] and row["flags"]["blocks_to_swap"]
    shown = call("presets", "list").stdout
    assert "FLUX.1-dev" in shown and "GPU memory with kohya's sd-scripts: 8G -, 12G 10.8 GB" in shown


def small_checkout(folder: Path) -> Path:
    """A checkout with a parser in two files, at a commit."""
    (folder / "library").mkdir(parents=True)
    (folder / "library/args.py").write_text("""
import torch
LIST = ['a', 'b']
def add_more(parser, deep: bool):
    parser.add_argument('--pick', choices=LIST, default=1 + len(LIST), help='one' + ' of')
    if deep:
        parser.add_argument('--depth', type=float, nargs='*')
    parser.add_argument('-s', '--shallow', action='store_true')
    parser.add_argument('--device', default=torch.device('cpu'))
""")
    (folder / "train.py").write_text("""
from library import args as more
def setup_parser():
    import argparse
    parser = argparse.ArgumentParser()
    more.add_more(parser, deep=True)
    return parser
""")
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".git/packed-refs").write_text("# pack-refs\n" + "a" * 40 + " refs/heads/main\n")
    return folder


def test_the_parser_is_read_at_each_commit_and_what_comes_from_elsewhere_is_not_guessed(tmp_path):
    checkout = small_checkout(tmp_path / "c")
    flags = schema.flags_of(checkout, "train.py")
    assert list(flags) == ["pick", "depth", "shallow", "device"] and flags["shallow"]["type"] == "bool"
    assert (flags["pick"]["choices"], flags["pick"]["default"], flags["pick"]["help"]) == (["a", "b"], 3, "one of")
    assert flags["depth"]["type"] == "float" and flags["depth"]["nargs"] == "*"
    assert flags["device"]["default"] is None and flags["device"]["default_is_computed"]
    (checkout / "library/args.py").write_text("def add_more(parser, *a, **k): pass\n")
    assert schema.flags_of(checkout, "train.py") == flags, "the same commit"
    (checkout / ".git/packed-refs").write_text("b" * 40 + " refs/heads/main\n")
    assert schema.flags_of(checkout, "train.py") == {}


def test_a_missing_or_unreadable_checkout_is_an_error_that_says_what_to_do(tmp_path):
    def refused(text: str | None, why: str) -> None:
        if text is not None:
            (tmp_path / "flux_train_network.py").write_text(text)
        with pytest.raises(presets.PresetError, match=why):
            schema.flags_of(tmp_path)

    refused(None, r"does not exist; run \./start\.sh sd-scripts")
    refused("def setup_parser(: pass", "cannot be parsed as Python")
    refused("pass", "no function setup_parser")
    refused("def setup_parser(): raise OSError('no disk')", r"setup_parser failed \(no disk\)")
