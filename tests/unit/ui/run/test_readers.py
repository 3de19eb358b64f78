"""What is kept of a file until it changes, and the end of a file."""

from ui.run import readers


def test_a_file_is_read_again_only_after_it_changed(tmp_path):
    file, made = tmp_path / "a.txt", []

    def read(young: bool = False) -> str:
        return readers.kept("test", tmp_path, [file], lambda: made.append(1) or file.read_text(), young)

    file.write_text("one")
    assert (read(), read(), len(made)) == ("one", "one", 1)
    file.write_text("three")
    assert (read(), len(made)) == ("three", 2)
    assert (read(young=True), len(made)) == ("three", 3), "a file that changed a moment ago may change in the same tick"


def test_the_oldest_values_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "KEPT", 2)
    given = ["a", "b", "a", "c"]
    assert [readers.latest(name, tmp_path, (), lambda name=name: [name]) for name in given] == [[one] for one in given]
    assert [name for name, _ in readers._kept] == ["a", "c"], "the ones used last"
