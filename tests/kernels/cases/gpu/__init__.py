"""All kernel cases for GPUs by name. `tests/kernels/devices` run them; no device is named here."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kernels.cases.gpu import (
    adapters,
    attention,
    experts,
    gated_delta,
    matmul,
    norm,
    page_attention,
    route,
    rwkv,
    sampling,
    short_conv,
    ssm_scan,
)
from tests.kernels.cases.gpu.case import Case

CASES: Mapping[str, Case] = {
    **matmul.PLAIN,
    **matmul.FEW,
    **matmul.UNITS,
    **matmul.KEPT,
    **matmul.INTEGERS,
    **matmul.SIMD_GROUPS,
    **experts.SMALL,
    **experts.TILES,
    **attention.CASES,
    **page_attention.CASES,
    **norm.CASES,
    **route.CASES,
    **sampling.CASES,
    **adapters.CASES,
    **gated_delta.CASES,
    **short_conv.CASES,
    **rwkv.CASES,
    **ssm_scan.CASES,
}
