"""What can be tuned in the kernels for GPUs, by the rule that makes them.

Every choice keeps to what all targets grant: 256 invocations and 32 KiB of shared memory. (GEMV: 8 rows of 32
invocations with 32 sums each are 256 and 32 KiB.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tir_schedules.gpu.decode_attention import SHARED_BYTES, decode_tile
from tir_schedules.gpu.matmul import HEAD, gemm_blocks_knob
from tir_schedules.gpu.prefill_attention import prefill_tile
from tir_schedules.gpu.sampling import sampling_knobs
from tir_schedules.op import Op
from tir_schedules.paged import Heads, heads_of
from tir_schedules.space import Choice, Knobs, Space

MANY_ROWS = 128  # of x, that prompts are measured with
CONTEXT = 512  # cached tokens that attention is measured with
_MOST_SUMS = 128  # of an invocation: more are in memory on any GPU
_MOST_KEPT_SUMS = 32  # over barriers: more take software adapters minutes to compile
_SOFTWARE_SHARED_BYTES = 1280  # beside which they keep sums over barriers: likewise
_MOST_SUMS_IN_MEMORY = 512  # where all are: on software adapters, whose loads cost more than their sums
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
    """One row; many rows where the kernel has a GEMM for them."""
    return _gemv_and_gemm(op, {**_GEMV, **_WORDS}, knobs)


def _subgroup_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """The same; what an invocation has at least is not to choose."""
    return _gemv_and_gemm(op, _GEMV, knobs)


def _gemv_and_gemm(op: Op, gemv: Mapping[str, tuple[int, ...]], knobs: Knobs) -> tuple[Space, ...]:
    one = _gemv(gemv, knobs)
    head = op.kind == "matmul" and op.int("n") >= HEAD * op.int("k")
    return (one,) if head else (one, _gemm(op, knobs))


def _gemv(values: Mapping[str, tuple[int, ...]], knobs: Knobs, family: str = "gemv") -> Space:
    default = {name: int(knobs[name]) for name in values}
    return Space("gemv", 1, family, _with(values, default), default, lambda choice: "")


def _gemm(op: Op, knobs: Knobs) -> Space:
    blocks = gemm_blocks_knob(op.int("n"), op.int("k"), knobs)
    default = {"gemm_rows": int(knobs["gemm_rows"]), blocks: int(knobs[blocks])}
    most = _MOST_SUMS_IN_MEMORY if _is_software(knobs) else max(_MOST_SUMS, default["gemm_rows"] * default[blocks])

    def problem(choice: Choice) -> str:
        return _too_much("sums of an invocation", choice["gemm_rows"] * choice[blocks], most)

    values = _with({"gemm_rows": _GEMM_ROWS, blocks: _GEMM_BLOCKS}, default)
    return Space("gemm", MANY_ROWS, "gemm", values, default, problem)


def _is_software(knobs: Knobs) -> bool:
    """Whether a target counts on software adapters: it has tiles for small weights then, whose shaders compile fast."""
    return int(knobs.get("gemm_small", 0)) > 0


def _expert_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One token's experts."""
    return (_gemv({**_GEMV, **_WORDS}, knobs, "experts"),)


def _subgroup_expert_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    return (_gemv(_GEMV, knobs, "experts"),)


def _norm(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row, and many: whole subgroups, where their size is known."""
    lanes = int(knobs.get("subgroup", 0))

    def space(bucket: str, rows: int, name: str) -> Space:
        default = {name: int(knobs.get(name, knobs["norm_threads"]))}
        threads = tuple(n for n in (4, 8, 16, 32, 64, 128, 256) if n % max(1, lanes) == 0)
        return Space(bucket, rows, "norm", _with({name: threads}, default), default, lambda choice: "")

    return space("one", 1, "norm_threads.one"), space("many", MANY_ROWS, "norm_threads.many")


def _attention(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One query, or a prompt's."""
    return (_decode(op, knobs) if "decode" in op.kind else _prefill(op, knobs),)


def _decode(op: Op, knobs: Knobs) -> Space:
    heads, tile = Heads(**heads_of(op)), decode_tile(knobs)
    default = {name: int(getattr(tile, name.removeprefix("decode_"))) for name in _DECODE}

    def problem(choice: Choice) -> str:
        wanted = decode_tile(choice)
        return (
            _too_much("bytes of shared memory", wanted.shared_bytes(heads.group), SHARED_BYTES)
            or _too_much("sums of an invocation", max(wanted.keys, wanted.columns) * heads.group, _MOST_SUMS)
            or _too_much("dimensions at once", (wanted.columns - 1) * wanted.threads, heads.head_dim - 1)
            or _too_much("keys at once", (wanted.keys - 1) * wanted.threads, wanted.part - 1)
        )

    return Space("decode", 1, "attention", _with(_DECODE, default), default, problem, CONTEXT)


def _subgroup_decode(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    tile = decode_tile(knobs)
    default = {"decode_blocks": tile.blocks} if tile.blocks else {"decode_part": tile.part}
    if not knobs["shuffle_x"]:  # elsewhere a workgroup is one subgroup
        default["decode_subgroups"] = tile.subgroups
    values = {name: _SUBGROUP_DECODE[name] for name in default}
    lanes = int(knobs["subgroup"])

    def problem(choice: Choice) -> str:
        return _too_much("invocations", choice.get("decode_subgroups", 1) * lanes, 256)

    return (Space("decode", 1, "attention", _with(values, default), default, problem, CONTEXT),)


def _prefill(op: Op, knobs: Knobs) -> Space:
    dim, tile = op.int("head_dim"), prefill_tile(knobs)
    default = {name: int(getattr(tile, name.removeprefix("prefill_"))) for name in _PREFILL}

    def problem(choice: Choice) -> str:
        wanted = prefill_tile(choice)
        return (
            wanted.problem
            or _too_much("sums of an invocation", wanted.sums(dim), max(_MOST_KEPT_SUMS, tile.sums(dim)))
            or _too_much("dots of an invocation", wanted.dots, _MOST_SUMS)
            or _too_much("bytes of shared memory", wanted.shared_bytes, most)
        )

    most = max(_SOFTWARE_SHARED_BYTES, tile.shared_bytes) if _is_software(knobs) else SHARED_BYTES
    keys = 0 if "chunk" in op.kind else CONTEXT
    return Space("prefill", MANY_ROWS, "attention", _with(_PREFILL, default), default, problem, keys)


def _sampling(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row of logits."""
    default = sampling_knobs(op.kind, knobs)
    values = {name: _SAMPLING[name] for name in default}
    return (Space("one", 1, "sampling", _with(values, default), default, lambda choice: ""),)


def _too_much(what: str, found: int, most: int) -> str:
    return f"{found} {what} are more than {most}" if found > most else ""


def _with(values: Mapping[str, tuple[int, ...]], default: Choice) -> dict[str, tuple[int, ...]]:
    """The values of every knob, the default's among them."""
    return {name: tuple(sorted({*choices, default[name]})) for name, choices in values.items()}


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
