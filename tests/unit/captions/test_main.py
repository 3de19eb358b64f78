"""The options of a captions job that the page stored: only what could have been typed."""

from captions.__main__ import OPTIONS, checked, parser


def test_the_defaults_are_options_and_what_the_page_does_not_store_is_none():
    given = vars(parser().parse_args(["a folder", "--with=tagger", "--general=0.5"]))
    stored = {name: given[name] for name in OPTIONS}
    assert checked(stored) == stored and stored["general"] == 0.5
    assert not {"target", "rewrite", "json"} & set(OPTIONS)
