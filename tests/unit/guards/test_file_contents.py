"""Numbers that are not finite are found in a file, whatever its type."""

import pytest

from guards import file_contents


@pytest.mark.parametrize(
    ("kind", "numpy_type", "low_bits"), [("F16", "<f2", 0), ("F32", "<f4", 16), ("F64", "<f8", 48)]
)
def test_finite_numbers_are_recognised_as_numpy_does_for_every_sign_exponent_and_leading_bit(
    kind, numpy_type, low_bits
):
    import numpy as np

    width = np.dtype(numpy_type).itemsize
    for low in {0, (1 << low_bits) - 1}:
        values = ((np.arange(65536, dtype=f"<u{width}") << low_bits) | low).astype(f"<u{width}")
        finite = np.isfinite(values.view(numpy_type))
        found = [file_contents._holds_non_finite(value.tobytes(), *file_contents._FLOATS[kind]) for value in values]
        assert (np.array(found) == ~finite).all()
