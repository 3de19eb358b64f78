"""The options of a captions job that the page stored: only what could have been typed."""

import pytest

from captions.__main__ import OPTIONS, checked, parser
from runs.files import RunError


def test_the_defaults_are_options_and_what_the_page_does_not_store_is_none():
    given = vars(parser().parse_args(["a folder", "--with=tagger", "--general=0.5"]))
    stored = {name: given[name] for name in OPTIONS}
    assert checked(stored) == stored and stored["general"] == 0.5
    assert not {"target", "rewrite", "json"} & set(OPTIONS)


def test_what_could_not_have_been_typed_is_refused():
    for options, message in (
        ([], "not options"),
        ({"engine": "magic"}, "not options"),
        ({"engine": "tagger", "target": "/etc"}, "not options"),
        ({"engine": "tagger", "general": "0.5"}, "general: '0.5' is not a value"),
        ({"engine": "florence", "task": "endless"}, "task: 'endless'"),
        ({"engine": "endpoint", "url": 5}, "url: 5"),
    ):
        with pytest.raises(RunError, match=message):
            checked(options)
