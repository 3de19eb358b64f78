"""An answer becomes a caption: one line of plain text, with its prefix, suffix and trigger."""

import contextlib
import re

import pytest
from hypothesis import given, settings, strategies as st

from captions.text import MOST_CHARACTERS, NoCaption, cleaned, framed


def test_an_answer_becomes_one_line_of_plain_text():
    for answer, caption in (
        ("A cat.", "A cat."),
        ('"A cat."', "A cat."),
        ("```\na cat\n```", "a cat"),
        ("<think>Is it a dog?</think>\nA cat.", "A cat."),
        ("<THINK>it never ends", None),
        ("a\x00c\x1b[31mat\x7f", "a c [31mat"),
        ("ca\u202et \ufeffhere", "cat here"),
        ("a family: 👨‍👩‍👧", "a family: 👨‍👩‍👧"),
        ("\ud800half", "�half"),
        ("", None),
        ("x" * (MOST_CHARACTERS + 1), None),
    ):
        with contextlib.nullcontext() if caption else pytest.raises(NoCaption):
            assert cleaned(answer) == caption


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_no_answer_gives_a_caption_with_control_characters_or_several_lines(answer):
    try:
        text = cleaned(answer)
    except NoCaption:
        return
    assert text and text == text.strip() and len(text.splitlines()) == 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    text.encode("utf-8")


def test_prefix_suffix_and_trigger():
    for caption, frame, result in (
        ("a cat", ("", "", "ohwx"), "ohwx, a cat"),
        ("Ohwx, a cat", ("", "", "ohwx"), "Ohwx, a cat"),
        ("ohwxen graze", ("", "", "ohwx"), "ohwx, ohwxen graze"),
        ("a cat", ("in style, ", "", "ohwx"), "ohwx, in style, a cat"),
    ):
        assert framed(caption, *frame) == result
