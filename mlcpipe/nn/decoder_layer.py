"""A decoder layer: a mixer of tokens and an MLP, each added to the residual stream, with norms where its form says."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates


@dataclass(frozen=True)
class LayerForm:
    """The names of a layer's norms, "" for none: of the inputs and the outputs of the mixer and the MLP.

    `parallel`: mixer and MLP read the same residual stream; an MLP without a norm of its own reads the mixer's input.
    `of_norms` are four factors (MiniMax): each norm's output replaces the residual stream, and in the sum of it and of
    what the mixer makes they have the first two, in that of the MLP the others. `after_eps`: the epsilon of
    the norms of outputs, where it is not that of the others.
    """

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    parallel: bool = False
    of_norms: tuple[float, float, float, float] | None = None
    after_eps: float | None = None


PRE_NORM = LayerForm()
POST_NORM = LayerForm("", "post_attention_layernorm", "", "post_feedforward_layernorm")
SANDWICH_NORM = LayerForm(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
PARALLEL = LayerForm(before_mlp="", parallel=True)
MIXER_ALONE = LayerForm(before_mixer="norm", before_mlp="")
MLP_ALONE = LayerForm(before_mixer="", before_mlp="norm")


class DecoderLayer(nn.Module):
    """x += scale * after(mixer(before(x))); x += scale * after(mlp(before(x))). `scale` is the residual multiplier.

    The attribute of the mixer is `mixer_name`, such as "self_attn" or "mamba". A layer may have one of
    the two blocks alone.
    """

    def __init__(
        self,
        mixer: nn.Module | None,
        mlp: nn.Module | None,
        hidden_size: int,
        norm: NormSpec,
        form: LayerForm = PRE_NORM,
        scale: float = 1.0,
        mixer_name: str = "self_attn",
    ) -> None:
        self.form, self.scale, self.mixer_name = form, scale, mixer_name
        after = norm if form.after_eps is None else replace(norm, eps=form.after_eps)
        for name, block in (
            (form.before_mixer, norm(hidden_size)), (mixer_name, mixer), (form.after_mixer, after(hidden_size)),
            (form.before_mlp, norm(hidden_size)), ("mlp", mlp), (form.after_mlp, after(hidden_size)),
        ):  # fmt: skip
            if name:
                setattr(self, name, block)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        form, mixer, y = self.form, getattr(self, self.mixer_name), x
        mixed = self._normed(form.before_mixer, x)
        if form.of_norms:
            kept, of_mixer, kept_too, of_mlp = form.of_norms
            y = op.add(scaled(mixed, kept), scaled(mixer(mixed, kv, cos, sin), of_mixer))
            fed = self._normed(form.before_mlp, y)
            return op.add(scaled(fed, kept_too), scaled(self.mlp(fed), of_mlp))
        if mixer is not None:
            y = op.add(x, self._added(form.after_mixer, mixer(mixed, kv, cos, sin)))
        if self.mlp is None:
            return y
        if not form.parallel:
            return op.add(y, self._added(form.after_mlp, self.fed(y)))
        fed = self._normed(form.before_mlp, x) if form.before_mlp else mixed
        return op.add(y, self._added(form.after_mlp, self.mlp(fed)))

    def fed(self, y: Tensor) -> Tensor:
        """What the MLP makes of the residual stream [m, hidden]."""
        fed: Tensor = self.mlp(self._normed(self.form.before_mlp, y))
        return fed

    def _normed(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = getattr(self, name)(x) if name else x
        return normed

    def _added(self, norm: str, y: Tensor) -> Tensor:
        return scaled(self._normed(norm, y), self.scale)


class SideBySide(nn.Module):
    """The sum of several mixers of one input: out_i * mixer_i(in_i * x), by name (mixer_i, in_i, out_i)."""

    def __init__(self, **mixers: tuple[nn.Module, float, float]) -> None:
        self.scales = {name: (before, after) for name, (_, before, after) in mixers.items()}
        for name, (mixer, *_) in mixers.items():
            setattr(self, name, mixer)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        parts = [
            scaled(getattr(self, name)(scaled(x, before), kv, cos, sin), after)
            for name, (before, after) in self.scales.items()
        ]
        return functools.reduce(op.add, parts)
