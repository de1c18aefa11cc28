"""A block of attention and MLP with one set of weights for several layers (Zamba, Glorioso et al. 2024).

Each use has keys and values of its own and, in Zamba 2, low-rank adapters of its own.
"""

from __future__ import annotations

from fractions import Fraction

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import LayerNorm, RMSNorm


class FirstInput(nn.Module):
    """What layers get beside their input: the input of the first."""

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids i32[m], x [m, hidden] -> x."""
        return x


class LowRank(nn.Module):
    """B A x: x [m, in_features] -> [m, out_features]."""

    def __init__(self, in_features: int, rank: int, out_features: int) -> None:
        self.a, self.b = Linear(in_features, rank), Linear(rank, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, in_features] -> [m, out_features]."""
        return self.b(self.a(x))


class Adapted(nn.Module):
    """W x + B A x, with one W for all uses of a block and an adapter B A of each: x [m, k] -> [m, n].

    `uses` are those of this block, of the `count` of all blocks in turn: the first is the block's own.
    """

    def __init__(self, linear: Linear, rank: int, uses: range, count: int) -> None:
        n, k = (int(extent) for extent in linear.weight.shape)
        self.linear, self.first = linear, uses[0]
        self.adapters = nn.ModuleList([LowRank(k, rank, n) if use in uses else nn.Module() for use in range(count)])

    def of_use(self, x: Tensor, use: int) -> Tensor:
        """x [m, k] -> [m, n], with the adapter of a use."""
        return op.add(self.linear(x), self.adapters[use](x))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, k] -> [m, n], with the adapter of the first use."""
        return self.of_use(x, self.first)


class OfUse(nn.Module):
    """What a module of another block computes, in a further use: that one has the parameters."""

    def __init__(self, of: nn.Module, use: int) -> None:
        self.of, self.use = (of,), use  # in a tuple, where parameters are not looked for
        for parameter in (of.linear if isinstance(of, Adapted) else of).parameters():
            parameter.attrs["reads"] = Fraction(parameter.attrs.get("reads", 1)) + 1

    def forward(self, x: Tensor) -> Tensor:
        """What the module makes of x."""
        of = self.of[0]
        return of.of_use(x, self.use) if isinstance(of, Adapted) else of(x)


def share(block: nn.Module, owner: nn.Module, use: int) -> None:
    """Have `block` compute with the parameters of `owner`, a block of the same kind that keeps them, in another use."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, Linear | Adapted | RMSNorm | LayerNorm):
            setattr(block, name, OfUse(value, use))
        elif isinstance(value, nn.Module):
            share(getattr(block, name), value, use)
