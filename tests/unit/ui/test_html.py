"""Markdown and figures as markup."""

import math

from ui_markup import harmless

from ui import html


def test_a_report_cannot_carry_links_or_pictures():
    text = "[click](javascript:alert(1)) ![p](http://outside/x.png) <http://outside> <b>raw</b>\n\n[a]: http://outside"
    tags = harmless(html.markdown(text))
    assert "a" not in tags.tags and "img" not in tags.tags and "b" not in tags.tags


def test_a_command_in_a_message_is_code_and_nothing_in_it_is_markup():
    assert html.linked("run `hf <auth> login`") == "run <code>hf &lt;auth&gt; login</code>"
    assert html.linked("run `python -m runs render cat`") == f"run <code>{html.START} render cat</code>"


def test_time_spans_and_speeds():
    speeds = {None: "–", math.nan: "–", 0.11: "9.1 steps/s", 1.5: "1.5 s/step", 99.9: "99.9 s/step"}
    speeds[1234.5] = "1,234 s/step"
    assert {seconds: html.per_step(seconds) for seconds in speeds} == speeds

    spans = {0: "0 s", 59.4: "59 s", 60: "1 min", 200: "3 min 20 s", 3599: "59 min", 7500: "2 h 5 min"}
    spans[360000] = "4 d 4 h"
    assert {seconds: html.duration(seconds) for seconds in spans} == spans
    assert [html.duration(seconds) for seconds in (None, math.nan, -5)] == ["–", "–", "0 s"]
