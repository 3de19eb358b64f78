"""What the commands of launch share: arguments from a table, the files of a folder."""

import argparse
import shlex

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
    words = shlex.split("r --image i --disk 80 --hours 3 --submit --secret A --secret B --kind two")
    given = vars(parser.parse_args(words))
    assert given["disk"] == 80 and given["hours"] == 3 and given["submit"]
    assert given["secret"] == ["A", "B"] and given["kind"] == "two"
    assert "its disk, 100 % of it" in parser.format_help()


def test_hidden_files_and_linked_folders_are_not_among_the_files_of_a_folder(tmp_path):
    for name in ("b/2", "a", "b/.x", ".git/config"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("")
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert common.plain_files(tmp_path / "in") == [tmp_path / "in" / "a", tmp_path / "in" / "b" / "2"]
