"""What a store sends goes in as few calls as it can, and its bytes are counted."""

from unittest.mock import Mock, call

from launch.store import filesystems
from launch.store.places import open_place


def test_bytes_and_small_files_are_sent_in_one_call_and_counted(tmp_path):
    (tmp_path / "x").write_bytes(b"file")
    place, moved, sent = open_place("s3://bucket"), [], Mock()
    place.write(sent, "bucket/bytes", b"bytes", moved.append)
    place.write(sent, "bucket/file", str(tmp_path / "x"), moved.append)
    assert moved == [5, 4]
    assert sent.pipe_file.call_args_list == [call("bucket/bytes", b"bytes"), call("bucket/file", b"file")]
    assert list(filesystems.blocks(b"abc")) == [b"abc"]
