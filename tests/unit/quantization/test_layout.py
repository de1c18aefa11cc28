from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.quantization import layout_names, load_layout, load_scheme
from mlcpipe.quantization.packing import pack, unpack
from tests.unit.quantization.reference import GROUPED, PLAIN, make_weight

SCHEMES = [*GROUPED, *PLAIN]


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("layout_name", layout_names())
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_unrepack_is_the_inverse_of_repack(scheme_name: str, layout_name: str, experts: int | None) -> None:
    scheme, layout = load_scheme(scheme_name), load_layout(layout_name)
    for n in (1, 5, 16, 17, 48):
        for k in (32, 33, 100):
            packed = pack(scheme, make_weight("normal", (n, k) if experts is None else (experts, n, k)))
            stored = layout.repack(scheme, packed, n, k)
            shapes = {name: (a.shape, a.dtype.name) for name, a in stored.items()}
            assert shapes == layout.shapes(scheme, n, k, experts)
            assert all(a.flags.c_contiguous for a in stored.values())
            back = layout.unrepack(scheme, stored, n, k)
            assert back.keys() == packed.keys()
            for name, array in packed.items():
                np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_rows16_puts_sixteen_rows_side_by_side(scheme_name: str) -> None:
    scheme, layout = load_scheme(scheme_name), load_layout("rows16")
    packed = pack(scheme, make_weight("normal", (37, 100)))
    for name, stored in layout.repack(scheme, packed, 37, 100).items():
        columns = packed[name].shape[1]
        assert stored.shape == (3, columns, 16)
        for block, column, lane in np.ndindex(stored.shape):
            row = block * 16 + lane
            assert stored[block, column, lane] == (packed[name][row, column] if row < 37 else 0)


@pytest.mark.parametrize("scheme_name", ["q4f16_1", "q4f32_1", "q0f16"])
def test_rows32_pairs_puts_two_halves_in_a_word(scheme_name: str) -> None:
    scheme, layout = load_scheme(scheme_name), load_layout("rows32_pairs")
    packed = pack(scheme, make_weight("normal", (40, 160)))  # five groups: the last word is half full
    for name, stored in layout.repack(scheme, packed, 40, 160).items():
        rows = np.concatenate([packed[name], np.zeros((24, packed[name].shape[1]), packed[name].dtype)])
        if rows.dtype == np.float16:
            bits = np.pad(rows.view(np.uint16).astype(np.uint32), [(0, 0), (0, rows.shape[1] % 2)])
            rows = bits[:, ::2] | bits[:, 1::2] << np.uint32(16)
        np.testing.assert_array_equal(stored, rows.reshape(2, 32, -1).transpose(0, 2, 1))


@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_missing_rows_decode_to_zero(scheme_name: str) -> None:
    scheme, layout = load_scheme(scheme_name), load_layout("rows16")
    stored = layout.repack(scheme, pack(scheme, make_weight("normal", (17, 100))), 17, 100)
    padded = unpack(scheme, layout.unrepack(scheme, stored, 32, 100), 100)
    assert not padded[17:].any()


@pytest.mark.parametrize("name", ["row", "rows16"])
def test_locate_is_where_repack_puts_a_number(name: str) -> None:
    scheme, layout = load_scheme("q0f32"), load_layout(name)
    w = make_weight("normal", (21, 7))
    stored = layout.repack(scheme, pack(scheme, w), 21, 7)["weight"]
    assert all(stored[layout.locate(n, k)] == w[n, k] for n, k in np.ndindex(w.shape))


def test_arrays_of_another_weight_are_refused() -> None:
    scheme, layout = load_scheme("q4f16_1"), load_layout("rows16")
    packed = pack(scheme, np.ones((17, 64), np.float32))
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1 row"):
        layout.repack(scheme, packed, 16, 64)
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1 rows16"):
        layout.unrepack(scheme, packed, 17, 64)
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1 row"):
        layout.repack(scheme, {}, 17, 64)


def test_layouts_are_found_by_name() -> None:
    assert layout_names() == ("row", "rows16", "rows32_pairs", "row_words")
    with pytest.raises(
        ConfigError, match="unknown weight layout; expected row rows16 rows32_pairs row_words; found rows8"
    ):
        load_layout("rows8")


def test_repack_needs_memory_for_its_result_only() -> None:
    scheme, layout = load_scheme("q4f16_1"), load_layout("rows16")
    packed = {name: np.ones(shape, dtype) for name, (shape, dtype) in scheme.shapes(4099, 2048, experts=2).items()}
    stored_bytes = sum(
        np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in layout.shapes(scheme, 4099, 2048, 2).values()
    )
    for method, arrays in ((layout.repack, packed), (layout.unrepack, layout.repack(scheme, packed, 4099, 2048))):
        tracemalloc.start()
        method(scheme, arrays, 4099, 2048)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < stored_bytes + 2**20
