"""Perplexity, KL divergence and change of probabilities; definitions are those of llama-perplexity.

After the same tokens the reference gives each token i of the vocabulary the probability p_i, the bundle q_i, and the
text continues with token t. Measured at each position:
    -ln q_t and -ln p_t       perplexity is exp of their mean
    sum p_i ln(p_i / q_i)     KL divergence of the bundle from the reference, in nats
    q_t - p_t                 Δp
    argmax q == argmax p      same top token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.quality import Comparison

_BLOCK = 1 << 20  # numbers per block; several float64 copies of a block exist at a time
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """For each position: -ln of the next token's probability, KL divergence, Δp, and 1 for the same top token."""

    nll: Floats
    reference_nll: Floats
    kld: Floats
    dp: Floats
    same_top: Floats

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        """The scores of all parts, concatenated."""
        names = [field.name for field in fields(Scores)]
        return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def score(logits: NDArray[np.float32], reference: NDArray[np.float32], following: NDArray[np.int64]) -> Scores:
    """The scores of the positions whose logits are f32[n, V], with the token i64[n] that follows each."""
    rows = max(1, _BLOCK // logits.shape[1])
    blocks = [slice(begin, begin + rows) for begin in range(0, len(following), rows)]
    return Scores.joined([_block(logits[block], reference[block], following[block]) for block in blocks])


def _block(logits: NDArray[np.float32], reference: NDArray[np.float32], following: NDArray[np.int64]) -> Scores:
    ln_q, ln_p = _log_softmax(logits), _log_softmax(reference)
    kld = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
    each = np.arange(len(following))
    own_q, own_p = ln_q[each, following], ln_p[each, following]
    same = (logits.argmax(axis=1) == reference.argmax(axis=1)).astype(np.float64)
    return Scores(-own_q, -own_p, kld, np.exp(own_q) - np.exp(own_p), same)


def _log_softmax(logits: NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def compare(scores: Scores) -> Comparison:
    """Means with standard errors, and quantiles."""
    kld, kld_error = _mean(scores.kld)
    ratio, ratio_error = _mean(scores.nll - scores.reference_nll)  # its variance has both and their covariance
    top1, top1_error = _mean(scores.same_top)
    dp2, dp2_error = _mean(scores.dp**2)
    median, high, highest = np.quantile(scores.kld, (0.5, 0.99, 0.999)).tolist()
    rms = math.sqrt(dp2)
    return Comparison(
        tokens=len(scores.nll),
        ppl=_exp(_mean(scores.nll)[0]),
        reference_ppl=_exp(_mean(scores.reference_nll)[0]),
        ppl_ratio=_exp(ratio),
        ppl_ratio_error=_exp(ratio) * ratio_error,
        kld=kld,
        kld_error=kld_error,
        kld_median=median,
        kld_99=high,
        kld_99_9=highest,
        kld_max=float(scores.kld.max()),
        top1=top1,
        top1_error=top1_error,
        rms_dp=rms,
        rms_dp_error=0.5 / rms * dp2_error if rms else 0.0,
    )


def _exp(mean: float) -> float:
    return math.exp(min(mean, 700.0))  # a model may give the text's tokens probability 0


def _mean(values: Floats) -> tuple[float, float]:
    """Mean and its standard error."""
    n = len(values)
    return float(values.mean()), float(values.std() / math.sqrt(n - 1)) if n > 1 else 0.0
