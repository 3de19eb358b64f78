"""What was typed in the form that publishes a LoRA."""

import pytest

import runs
from ui.run import publish


@pytest.mark.parametrize(
    ("content", "found"),
    [(b'{"title": "a", "repo": 7}', {"title": "a"}), (b"[]", {}), (b"\xff{", {}), (b'{"title": "cut', {}), (None, {})],
)
def test_what_was_typed_is_read_from_any_file(tmp_path, content, found):
    if content is not None:
        (tmp_path / publish.TYPED).write_bytes(content)
    assert publish.typed(tmp_path) == found


def test_what_is_typed_is_kept_while_there_is_a_run(tmp_path):
    values = {"title": "Die Katze \u2665", "licence": None}
    publish.keep_typed(tmp_path, values)
    assert publish.typed(tmp_path) == {"title": "Die Katze \u2665", "licence": ""}
    publish.keep_typed(tmp_path / "deleted", values)
    assert not (tmp_path / "deleted").exists()
    with pytest.raises(runs.RunError, match="keep what was typed"):
        (tmp_path / publish.TYPED).unlink()
        (tmp_path / publish.TYPED).mkdir()
        publish.keep_typed(tmp_path, values)
