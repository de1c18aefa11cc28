"""Nodes of the prefix tree, and what sequences leave in them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

NONE = -1  # instead of a page, or a slot


def key_of(parent: int, tokens: Hashable) -> int:
    """A number for a page after that of `parent`, or for a namespace after 0."""
    return hash((parent, tokens))


class Node:
    """A full page. `children`: tokens -> `Sequence.decode_mask` -> node. `key`: of its tokens and those before.

    `pages`: by group, and last the slot of a checkpoint; -1 where there is none, or no longer one.

    Below the root is a node without pages for each namespace, with the namespace as its tokens.
    """

    __slots__ = ("children", "decode_mask", "key", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Hashable, decode_mask: int, pages: list[int]) -> None:
        self.parent, self.tokens, self.decode_mask, self.pages = parent, tokens, decode_mask, pages
        self.key: int = 0 if parent is None else key_of(parent.key, tokens)
        self.children: dict[Any, dict[int, Node]] = {}

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
