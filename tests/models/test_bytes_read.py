"""How many bytes of weights a decode step reads: what the share of the read bandwidth is computed from."""

from __future__ import annotations

import pytest

from mlcpipe.weights.table import Weight, weight_table
from tests.models.small_configs import EXPERTS, build


def _weights(family: str, **fields: object) -> dict[str, Weight]:
    return {weight.name: weight for weight in weight_table(build(family, **fields).named_parameters())}


def test_of_a_tied_embedding_all_is_read_and_of_another_one_row() -> None:
    tied = _weights("llama", tie_word_embeddings=True)["model.embed_tokens.weight"]
    assert tied.decode_nbytes == tied.nbytes == 96 * 64 * 4
    untied = _weights("llama", tie_word_embeddings=False)
    assert untied["model.embed_tokens.weight"].decode_nbytes == 64 * 4
    assert untied["lm_head.weight"].decode_nbytes == 96 * 64 * 4


@pytest.mark.parametrize("family", EXPERTS)
def test_of_the_experts_the_chosen_ones_are_read(family: str) -> None:
    chosen = 2 if family == "phimoe" else 3  # which has no other number
    weights = _weights(family, num_experts_per_tok=chosen)
    experts = [weight for weight in weights.values() if weight.experts is not None]
    assert len(experts) in (2, 4, 6, 8) and all(
        4 * weight.decode_nbytes == chosen * weight.nbytes for weight in experts
    )
    tables = ("embed", "per_layer.table")  # of which a token reads a row
    others = [w for name, w in weights.items() if w.experts is None and not any(one in name for one in tables)]
    assert others and all(weight.decode_nbytes == weight.nbytes for weight in others)
