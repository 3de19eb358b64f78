"""A read that lacks a descriptor or memory is tried again at once: a scan reads hundreds of files and must not fail as a whole."""

import builtins
import errno

import pytest

from guards.reading import TRIES_COUNT, read_bytes


@pytest.mark.parametrize(
    ("number", "tries"), [(errno.EMFILE, TRIES_COUNT), (errno.ENOMEM, TRIES_COUNT), (errno.EIO, 1)]
)
def test_a_shortage_is_tried_again_and_another_error_is_not(tmp_path, monkeypatch, number, tries):
    (tmp_path / "stat").write_bytes(b"7 (python) S")
    real, left = open, [0]

    def failing(*arguments, **more):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, "no")
        return real(*arguments, **more)

    monkeypatch.setattr(builtins, "open", failing)
    left[0] = tries - 1
    assert read_bytes(tmp_path / "stat") == b"7 (python) S"
    left[0] = tries
    with pytest.raises(OSError):
        read_bytes(tmp_path / "stat")
