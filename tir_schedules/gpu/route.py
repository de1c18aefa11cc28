"""The router of a mixture of experts: one invocation for each token."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Tensor, add, function, overflowed, put
from tir_schedules.gpu.kernel import LOWEST, ceildiv, keep, launch, local
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype

_THREADS = 64


def moe_route(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """logits f32[m, experts] -> weights f32[m, chosen], ids i32[m, chosen]: best first, then the lower id.

    Rank t is the best logit below rank t - 1 in the order (logit, -id). With NaN or infinity among the logits any
    expert may be chosen, but one that exists, and the weights are NaN, as softmax has it.
    """
    experts, chosen, normalize = op.int("experts"), op.int("chosen"), bool(op.int("normalize"))
    m = tirx.Var("m", "int64")
    arguments = {
        "logits": Tensor((m, experts), "float32"),
        "weights": Tensor((m, chosen), "float32"),
        "ids": Tensor((m, chosen), "int32"),
    }

    def body(logits: Buffer, weights: Buffer, ids: Buffer) -> None:
        with launch(_THREADS, ceildiv(m, _THREADS)) as (bx, _, tx):
            i = keep(bx * _THREADS + tx)
            with I.If(i < I.cast(m, "int32")), I.Then():
                best, previous = local(1, "int32"), local(1, "int32")
                best_logit, limit, total = local(1), local(1), local(1)
                put(previous, 0, -1)
                put(limit, 0, -LOWEST)
                put(total, 0, 0.0)
                for t in range(chosen):
                    put(best, 0, -1)
                    put(best_logit, 0, LOWEST)
                    with I.serial(0, experts) as e:
                        logit = keep(logits[i, e])
                        after = I.Or(logit < limit[0], I.And(logit == limit[0], e > previous[0]))
                        better = I.Or(best[0] < 0, logit > best_logit[0])
                        with I.If(I.And(after, better)), I.Then():
                            put(best, 0, e)
                            put(best_logit, 0, logit)
                    put(best, 0, I.max(best[0], 0))
                    put(ids, (i, t), best[0])
                    put(weights, (i, t), logits[i, best[0]])
                    put(previous, 0, best[0])
                    put(limit, 0, logits[i, best[0]])
                first = local(1)
                put(first, 0, logits[i, ids[i, 0]])
                if normalize:
                    for t in range(chosen):
                        add(total, 0, I.exp(weights[i, t] - first[0]))
                else:
                    with I.serial(0, experts) as e:
                        add(total, 0, I.exp(logits[i, e] - first[0]))
                nan = local(1, "uint32")  # the bits: WGSL has no constant NaN, and drivers differ in x / NaN
                put(nan, 0, I.uint32(0))
                with I.serial(0, experts) as e:
                    logit = keep(logits[i, e])
                    with I.If(overflowed(logit)), I.Then():
                        put(nan, 0, I.bitwise_or(I.reinterpret("uint32", logit), I.uint32(0x7FC00000)))
                for t in range(chosen):
                    share = I.exp(weights[i, t] - first[0]) / total[0]
                    put(weights, (i, t), I.if_then_else(nan[0] > I.uint32(0), I.reinterpret("float32", nan[0]), share))

    return function("moe_route", arguments, body)


RULES = (NamedRule("gpu.moe_route", ("moe_route",), with_output_dtype(moe_route)),)
