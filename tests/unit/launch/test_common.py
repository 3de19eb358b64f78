"""What the commands of launch share: arguments from a table, the last line of JSON, templates, the files of a folder."""

import argparse
import json

from launch import common

ROWS = (
    common.RUN,
    ("--image NAME", ..., "the image"),
    ("--disk GB", 40, "its disk, 100 % of it"),
    ("--hours N", int, "at most"),
    ("--submit", False, "do it"),
    ("--secret NAME", [], "a variable"),
    ("--kind", ("one", "two"), "which"),
)


def test_a_row_of_the_table_says_the_type_of_its_argument():
    parser = argparse.ArgumentParser()
    common.add_options(parser, ROWS)
    given = vars(parser.parse_args(["my run", "--image", "i"]))
    defaults = {"disk": 40, "hours": None, "submit": False, "secret": [], "kind": "one"}
    assert given == {"run": "my run", "image": "i", **defaults}
    words = [
        "r",
        "--image",
        "i",
        "--disk",
        "80",
        "--hours",
        "3",
        "--submit",
        "--secret",
        "A",
        "--secret",
        "B",
        "--kind",
        "two",
    ]
    given = vars(parser.parse_args(words))
    assert given["disk"] == 80 and given["hours"] == 3 and given["submit"]
    assert given["secret"] == ["A", "B"] and given["kind"] == "two"
    assert "its disk, 100 % of it" in parser.format_help()


def test_the_value_is_the_last_line_where_json_is_asked_for(capsys):
    for asked in (False, True):
        assert common.report(argparse.Namespace(json=asked), "a text", {"name": "ü"}) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert first == "a text" and [json.loads(line) for line in rest] == [{"name": "ü"}] * asked


def test_a_template_gets_its_values_and_the_sections_that_are_named(tmp_path):
    (tmp_path / "template").write_text("run @NAME@\n#[GPU\ngpus @COUNT@\n#]\nend\n", encoding="utf-8")
    template = str(tmp_path / "template")
    assert common.fill(template, name="cat") == "run cat\nend\n"
    assert common.fill(template, "GPU", name="cat", count="2") == "run cat\ngpus 2\nend\n"


def test_hidden_files_and_linked_folders_are_not_among_the_files_of_a_folder(tmp_path):
    for name in ("b/2", "a", "b/.x", ".git/config"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("")
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert common.plain_files(tmp_path / "in") == [tmp_path / "in" / "a", tmp_path / "in" / "b" / "2"]
