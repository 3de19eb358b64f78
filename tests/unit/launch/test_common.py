"""What the commands of launch share: the files of a folder. The commands' own tests have each kind of argument."""

from launch import common


def test_hidden_files_and_linked_folders_are_not_among_the_files_of_a_folder(tmp_path):
    for name in ("b/2", "a", "b/.x", ".git/config"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("")
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert common.plain_files(tmp_path / "in") == [tmp_path / "in" / "a", tmp_path / "in" / "b" / "2"]
