"""The results of `mlcpipe quality` in the manifest."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlcpipe.bundle.schema import Frozen, Name, Positive

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Comparison(Frozen):
    """The next-token distributions of two models after the same tokens; definitions are those of llama-perplexity.

    `kld` is KL(reference || bundle) in nats, `_error` a standard error, and `dp` the change of the probability of the
    text's own next token.
    """

    tokens: Positive = Field(description="positions that were compared")
    ppl: NotNegative
    reference_ppl: NotNegative
    ppl_ratio: NotNegative
    ppl_ratio_error: NotNegative
    kld: float
    kld_error: NotNegative
    kld_median: float
    kld_99: float
    kld_99_9: float
    kld_max: float
    top1: Share = Field(description="share of positions with the same most probable token")
    top1_error: NotNegative
    rms_dp: Share
    rms_dp_error: NotNegative


class QualityInfo(Frozen):
    """How a bundle differs from its reference: `prefill` and `decode` are different kernels."""

    reference: Name = Field(description="the reference checkpoint's name, or its folder's")
    reference_hash: Name
    reference_quantization: Name
    text: Name = Field(description="file name of the text")
    text_sha256: Sha256
    window: Positive = Field(description="tokens of a window; the first half is context only")
    variant: Name = Field(description="the variant of the kernels that was measured")
    bits_per_weight: NotNegative
    prefill: Comparison
    decode: Comparison
