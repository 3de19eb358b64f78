"""Numbers that are not finite are found in a file, whatever its type."""

import random

import pytest
import torch

from guards import file_contents


def test_finite_numbers_are_recognised_as_numpy_does_for_every_sign_exponent_and_leading_bit():
    import numpy as np

    for kind, numpy_type, low_bits in (("F16", "<f2", 0), ("F32", "<f4", 16), ("F64", "<f8", 48)):
        width = np.dtype(numpy_type).itemsize
        for low in {0, (1 << low_bits) - 1}:
            values = ((np.arange(65536, dtype=f"<u{width}") << low_bits) | low).astype(f"<u{width}")
            finite = np.isfinite(values.view(numpy_type))
            found = [file_contents._holds_non_finite(value.tobytes(), *file_contents._FLOATS[kind]) for value in values]
            assert (np.array(found) == ~finite).all()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [False, True])
def test_an_optimizer_state_with_any_damage_is_damaged_and_no_error(tmp_path, zipped):
    path, draw = tmp_path / "optimizer.bin", random.Random(1)
    state = {"state": {0: {"step": torch.tensor(1.0), "m": torch.ones(4, 4)}}, "param_groups": [{"lr": 1e-4}]}
    torch.save({"state": {0: random.Random()}}, path, _use_new_zipfile_serialization=zipped)
    assert file_contents.damage(path) == "", "an object of an optimizer's library, as those of SCION have"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    assert file_contents.damage(path) == ""
    for content in (b"no pickle", b"", b"\x80\x04.", *(draw.randbytes(9) for _ in range(200))):
        at = draw.randrange(len(whole) // 2)
        path.write_bytes(whole[:at] + content + whole[at + len(content) :] if len(content) == 9 else content)
        damage = file_contents.damage(path)
        assert damage.startswith("optimizer.bin: does not load: ") if damage else len(content) == 9, content
