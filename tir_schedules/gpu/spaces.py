"""The choices of `mlcpipe tune` in GPU kernels, by rule.

Every choice fits all targets: 256 invocations and 32 KiB of shared memory. GEMV at most: 8 splits of 32 invocations
with 32 sums each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tir_schedules.gpu.attention.decode_part import SHARED_BYTES, decode_tile
from tir_schedules.gpu.attention.functions import DECODE_KINDS
from tir_schedules.gpu.attention.prefill_tile import PREFILL_KNOBS, prefill_tile
from tir_schedules.gpu.matmul.gemm import gemm_blocks_knob
from tir_schedules.gpu.matmul.packed import is_lm_head
from tir_schedules.gpu.sampling.mlc_contract import sampling_knobs
from tir_schedules.op import Op
from tir_schedules.paged import Heads, heads_of
from tir_schedules.rule import Knobs
from tir_schedules.space import Choice, Space, with_default

MANY_ROWS = 128  # rows of x to measure prompts with
CONTEXT = 512  # cached tokens to measure attention with
_MAX_SUMS = 128  # of an invocation: more spill to memory on any GPU
_MAX_KEPT_SUMS = 32  # across barriers: with more, software adapters take minutes to compile
_SOFTWARE_SHARED_BYTES = 1280  # with which they keep sums across barriers: likewise
_MAX_SUMS_IN_MEMORY = 512  # on software adapters, where all sums are in memory and loads cost more
_GEMV: Mapping[str, tuple[int, ...]] = {
    "gemv_blocks": (1, 2, 4, 8, 16, 32),
    "gemv_invocations": (1, 1024, 4096, 16384, 65536),
}
_WORDS: Mapping[str, tuple[int, ...]] = {"gemv_words": (8, 16, 32, 64, 128)}
_DECODE: Mapping[str, tuple[int, ...]] = {
    "decode_part": (32, 64, 128, 256, 512, 1024),
    "decode_threads": (16, 32, 64, 128),
    "decode_keys": (1, 2, 4, 8),
    "decode_columns": (1, 2, 4, 8),
}
_SUBGROUP_DECODE: Mapping[str, tuple[int, ...]] = {
    "decode_part": (32, 64, 128, 256, 512, 1024),
    "decode_blocks": (64, 128, 256, 512, 1024, 2048),
    "decode_subgroups": (1, 2, 4, 8),
}
_PREFILL: Mapping[str, tuple[int, ...]] = {
    "prefill_threads": (8, 16, 32, 64, 128),
    "prefill_rows": (8, 16, 32, 64),
    "prefill_keys": (8, 16, 32, 64),
    "prefill_tall": (1, 2, 4, 8, 16),
}
_SAMPLING: Mapping[str, tuple[int, ...]] = {
    "softmax_threads": (4, 8, 16, 32, 64, 128, 256),
    "sort_digit_bits": (4, 5),  # 8 passes, or 6
    "sort_run": (16, 32, 64, 128, 256, 512),
    "top_p_threads": (4, 8, 16, 32, 64, 128, 256),
}
_GEMM_ROWS, _GEMM_BLOCKS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64)


def _matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row, and many rows, as the kernel has a GEMV or a GEMM."""
    return _gemv_and_gemm(op, {**_GEMV, **_WORDS}, knobs)


def _subgroup_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """The same without the minimal number of words of an invocation."""
    return _gemv_and_gemm(op, _GEMV, knobs)


def _gemv_and_gemm(op: Op, gemv: Mapping[str, tuple[int, ...]], knobs: Knobs) -> tuple[Space, ...]:
    head = op.kind == "matmul" and is_lm_head(op.int("n"), op.int("k"))
    many = () if head or not op.may_be_many else (_gemm(op, knobs),)
    return (_gemv(gemv, knobs), *many) if op.may_be_few else many


def _gemv(values: Mapping[str, tuple[int, ...]], knobs: Knobs, family: str = "gemv") -> Space:
    default = {name: int(knobs[name]) for name in values}
    return Space("gemv", 1, family, with_default(values, default), default, lambda choice: "")


def _gemm(op: Op, knobs: Knobs) -> Space:
    blocks = gemm_blocks_knob(op.int("n"), op.int("k"), knobs)
    default = {"gemm_rows": int(knobs["gemm_rows"]), blocks: int(knobs[blocks])}
    max_sums = _MAX_SUMS_IN_MEMORY if _is_software(knobs) else max(_MAX_SUMS, default["gemm_rows"] * default[blocks])

    def problem(choice: Choice) -> str:
        return _too_much("sums of an invocation", choice["gemm_rows"] * choice[blocks], max_sums)

    values = with_default({"gemm_rows": _GEMM_ROWS, blocks: _GEMM_BLOCKS}, default)
    return Space("gemm", MANY_ROWS, "gemm", values, default, problem)


def _is_software(knobs: Knobs) -> bool:
    """Whether a target expects software adapters: it then has small tiles, whose shaders compile fast."""
    return int(knobs.get("gemm_small", 0)) > 0


def _expert_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One token's experts."""
    return (_gemv({**_GEMV, **_WORDS}, knobs, "experts"),)


def _subgroup_expert_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    return (_gemv(_GEMV, knobs, "experts"),)


def _norm(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row, and many; whole subgroups if their size is known."""
    lanes = int(knobs.get("subgroup", 0))

    def space(bucket: str, rows: int, name: str) -> Space:
        default = {name: int(knobs.get(name, knobs["norm_threads"]))}
        threads = tuple(n for n in (4, 8, 16, 32, 64, 128, 256) if n % max(1, lanes) == 0)
        return Space(bucket, rows, "norm", with_default({name: threads}, default), default, lambda choice: "")

    one, many = space("one", 1, "norm_threads.one"), space("many", MANY_ROWS, "norm_threads.many")
    return tuple(each for each, may in ((one, op.may_be_few), (many, op.may_be_many)) if may)


def _attention(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One query, or a prompt's."""
    return (_decode(op, knobs) if op.kind in DECODE_KINDS else _prefill(op, knobs),)


def _decode(op: Op, knobs: Knobs) -> Space:
    heads, default_tile = Heads(**heads_of(op)), decode_tile(knobs)
    default = {name: int(getattr(default_tile, name.removeprefix("decode_"))) for name in _DECODE}

    def problem(choice: Choice) -> str:
        tile = decode_tile(choice)
        return (
            _too_much("bytes of shared memory", tile.shared_bytes(heads.group), SHARED_BYTES)
            or _too_much("sums of an invocation", max(tile.keys, tile.columns) * heads.group, _MAX_SUMS)
            or _too_much("dimensions at once", (tile.columns - 1) * tile.threads, heads.v_dim - 1)
            or _too_much("keys at once", (tile.keys - 1) * tile.threads, tile.part - 1)
        )

    return Space("decode", 1, "attention", with_default(_DECODE, default), default, problem, CONTEXT)


def _subgroup_decode(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    tile = decode_tile(knobs)
    default = {"decode_blocks": tile.blocks} if tile.blocks else {"decode_part": tile.part}
    if not knobs["shuffle_x"]:  # with shuffles a workgroup is one subgroup
        default["decode_subgroups"] = tile.subgroups
    values = {name: _SUBGROUP_DECODE[name] for name in default}
    lanes = int(knobs["subgroup"])

    def problem(choice: Choice) -> str:
        return _too_much("invocations", choice.get("decode_subgroups", 1) * lanes, 256)

    return (Space("decode", 1, "attention", with_default(values, default), default, problem, CONTEXT),)


def _prefill(op: Op, knobs: Knobs) -> Space:
    dim, tile = op.int("head_dim"), prefill_tile(knobs)
    default = {name: int(getattr(tile, PREFILL_KNOBS[name])) for name in _PREFILL}

    def problem(choice: Choice) -> str:
        chosen = prefill_tile(choice)
        return (
            chosen.problem
            or _too_much("sums of an invocation", chosen.sums(dim), max(_MAX_KEPT_SUMS, tile.sums(dim)))
            or _too_much("dots of an invocation", chosen.dots, _MAX_SUMS)
            or _too_much("bytes of shared memory", chosen.shared_bytes, max_bytes)
        )

    max_bytes = max(_SOFTWARE_SHARED_BYTES, tile.shared_bytes) if _is_software(knobs) else SHARED_BYTES
    keys = 0 if "chunk" in op.kind else CONTEXT
    return Space("prefill", MANY_ROWS, "attention", with_default(_PREFILL, default), default, problem, keys)


def _sampling(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row of logits."""
    default = sampling_knobs(op.kind, knobs)
    values = {name: _SAMPLING[name] for name in default}
    return (Space("one", 1, "sampling", with_default(values, default), default, lambda choice: ""),)


def _too_much(what: str, count: int, limit: int) -> str:
    return f"{count} {what} are more than {limit}" if count > limit else ""


SPACES: Mapping[str, Callable[[Op, Knobs], tuple[Space, ...]]] = {
    "gpu.matmul": _matmul,
    "gpu.subgroup_matmul": _subgroup_matmul,
    "gpu.expert_matmul": _expert_matmul,
    "gpu.subgroup_expert_matmul": _subgroup_expert_matmul,
    "gpu.norm": _norm,
    "gpu.attention": _attention,
    "gpu.sampling": _sampling,
    "gpu.subgroup_attention": _subgroup_decode,
}
