"""Calls check their own inputs, and no tensor of a list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlcpipe.passes import pipeline
from tests.unit.passes.small import apply, passes_through, small_llama


@pytest.mark.parametrize("name", ["decode", "decode_adapted"])
def test_no_tensor_of_a_list_is_matched(name: str) -> None:
    state = replace(small_llama(()), adapters=True)
    lowered = pipeline.run(apply(state, *passes_through("check_bindings")), pipeline.VM).mod[name].script()
    for check in ("check_tensor_info", "match_shape"):  # of the tokens, the step and the logits
        assert lowered.count(f'"vm.builtin.{check}"') == 3
