"""The flags of a trainer are read from its source, at each commit."""

import pytest

import presets
from presets import schema


def small_checkout(folder):
    """A checkout with a parser in two files."""
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
    return folder


def test_the_parser_is_read_at_each_commit_and_what_comes_from_elsewhere_is_not_guessed(tmp_path):
    checkout = small_checkout(tmp_path / "c")
    flags = schema.flags_of(checkout, "train.py", "a")
    assert list(flags) == ["pick", "depth", "shallow", "device"] and flags["shallow"]["type"] == "bool"
    assert (flags["pick"]["choices"], flags["pick"]["default"], flags["pick"]["help"]) == (["a", "b"], 3, "one of")
    assert flags["depth"]["type"] == "float" and flags["depth"]["nargs"] == "*"
    assert flags["device"]["default"] is None and flags["device"]["default_is_computed"]
    (checkout / "library/args.py").write_text("def add_more(parser, *a, **k): pass\n")
    assert schema.flags_of(checkout, "train.py", "a") == flags, "the same commit"
    assert schema.flags_of(checkout, "train.py", "b") == schema.flags_of(checkout, "train.py") == {}


def test_a_missing_or_unreadable_checkout_is_an_error_that_says_what_to_do(tmp_path):
    def refused(text: str | None, why: str) -> None:
        if text is not None:
            (tmp_path / "flux_train_network.py").write_text(text)
        with pytest.raises(presets.PresetError, match=why):
            schema.flags_of(tmp_path)

    refused(None, r"does not exist; run \./start\.sh sd-scripts")
    refused("def setup_parser(: pass", "cannot be parsed as Python")
    refused("def setup_parser(): raise OSError('no disk')", r"setup_parser failed \(no disk\)")
