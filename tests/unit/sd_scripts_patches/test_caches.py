"""Cache files of musubi-tuner that are damaged, without musubi-tuner."""

import pytest

from sd_scripts_patches.musubi import caches


def test_a_cache_with_a_header_of_terabytes_is_renamed_before_anything_makes_room_for_it(tmp_path):
    path = tmp_path / "a_zi.safetensors"
    path.write_bytes(bytes([16, 0, 0, 0, 0, 16, 0, 0]) + b"{}" + b" " * 98)
    with pytest.raises(ValueError, match=r"a_zi\.safetensors is damaged .*renamed to a_zi\.safetensors\.corrupt"):
        caches.within_limit(path, lambda: path.open("rb").read(1 << 44))
    assert not path.exists()
