"""Nodes of the prefix tree, and what sequences leave in them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

NONE = -1  # instead of a page, or a slot


class Node:
    """A full page. `children`: tokens -> `Sequence.decode_mask` -> node.

    `pages`: by group, and last the slot of a checkpoint; -1 where there is none, or no longer one.

    Below the root is a node without pages for each namespace, with the namespace as its tokens.
    """

    __slots__ = ("children", "decode_mask", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Hashable, decode_mask: int, pages: list[int]) -> None:
        self.parent, self.tokens, self.decode_mask, self.pages = parent, tokens, decode_mask, pages
        self.children: dict[Hashable, dict[int, Node]] = {}

    def child(self, tokens: Hashable, decode_mask: int) -> Node:
        """The child, made if there is none."""
        variants = self.children.setdefault(tokens, {})
        if decode_mask not in variants:
            variants[decode_mask] = Node(self, tokens, decode_mask, [NONE] * len(self.pages))
        return variants[decode_mask]


class Checkpoint(NamedTuple):
    """A slot that a sequence left in a node, after `tokens` tokens; its checkpoint before is after `before` tokens."""

    node: Node
    slot: int
    tokens: int
    before: int
