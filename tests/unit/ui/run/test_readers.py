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


def test_the_end_of_a_file_has_at_most_so_many_bytes(tmp_path):
    (tmp_path / "log").write_bytes(b"0123456789")
    found = [readers.end_of(tmp_path / name, most) for name, most in (("log", 4), ("log", 40), ("none", 4))]
    assert found == [b"6789", b"0123456789", b""]
