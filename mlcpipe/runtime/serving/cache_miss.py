"""Why a prompt did not start later: the reason for which its first computed page was not found."""

from __future__ import annotations

from mlcpipe.runtime.sampling_params import CacheMiss
from mlcpipe.runtime.serving.prefix_node import NONE, Node, key_of
from mlcpipe.runtime.serving.prefix_tree import PrefixTree, page_tokens
from mlcpipe.runtime.serving.sequence import Sequence
from tir_schedules.step_layout import PAGE


def cache_miss(tree: PrefixTree, sequence: Sequence) -> CacheMiss | None:
    """Of a sequence that starts with what was found; None if that is all that was ever computed of its prompt.

    Only what the request's own namespace computed counts: others' prompts stay secret.
    """
    how, last = sequence.request.denoising, len(sequence.tokens) - 1
    start, pages = sequence.computed // PAGE, (last if how is None else how.begin(last)) // PAGE
    if start >= pages:
        return None
    if sequence.taken_page >= 0:  # up to the token
        differs = sequence.computed < sequence.taken_from
        return CacheMiss("prompt_differs", sequence.computed) if differs else None
    known = tree.known(sequence)
    if len(known) > start:
        return _gone(tree, known[start:])
    return _not_known(tree, sequence, known)


def _gone(tree: PrefixTree, rest: list[Node]) -> CacheMiss:
    """The pages after the start are there, but not what the next token needs of the rest."""
    slots = len(tree.pool.groups)
    if tree.pool.slots is None or any(node.pages[slots] != NONE for node in rest):
        return CacheMiss("evicted")  # of a window
    return CacheMiss("state_evicted" if any((node.key, slots) in tree.evicted for node in rest) else "no_checkpoint")


def _not_known(tree: PrefixTree, sequence: Sequence, known: list[Node]) -> CacheMiss | None:
    """The page after the known ones is not there."""
    at, page = len(known) * PAGE, page_tokens(sequence, len(known))
    families, own = tree.families(), tree.family(sequence)
    node = known[-1] if known else families.get(own)
    if (key_of(node.key if node else key_of(0, own), page), 0) in tree.evicted:
        return CacheMiss("evicted")
    if node is not None and page in node.children:
        return CacheMiss("deterministic")  # computed as an answer
    others = [one for one, root in families.items() if one != own and one[0][0] == own[0][0] and page in root.children]
    if others and not known:
        return CacheMiss("adapter_differs" if any(one[0] != own[0] for one in others) else "length_differs")
    if node is None:
        return CacheMiss("first_prompt")
    same, left = 0, list(node.children)
    while following := [one for one in left if one[same] == page[same]]:
        same, left = same + 1, following
    return CacheMiss("prompt_differs", at + same) if left else None
