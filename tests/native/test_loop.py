"""The loop around a model's forwards takes memory from the heap at the border of a page, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.native_loop import loop_costs, write_loop_program
from mlcpipe.errors import UsageError
from tests.conftest import Bundles
from tests.native.conftest import private_cache

pytestmark = pytest.mark.full  # compiles TVM's runtime
TOKENS = 256  # drafts' tables grow by doubling: of many tokens that is little
# Allocations a token: each 16 tokens make a node of the prefix tree; of several answers the cost model is fitted, too.
ONE, SEVERAL = 0.5, 3.0


def test_only_pages_of_tokens_allocate(
    demo_bundles: Bundles, copy_of: Callable[[Path], Path], shared: Path, tmp_path: Path
) -> None:
    """TVM's virtual machine does, which shows that allocations are counted."""
    from mlcpipe.compiler.link import find_cxx

    program = tmp_path / "loop"
    try:
        write_loop_program(find_cxx(), private_cache(shared), program)
    except UsageError as error:
        pytest.skip(str(error))
    greedy, drawn, several = loop_costs(program, copy_of(demo_bundles["q4f16_1"]), TOKENS, [4])
    assert all(0 < one.own_allocations < ONE for one in (greedy, drawn))
    assert 0 < several.own_allocations < SEVERAL
    assert min(one.model_allocations for one in (greedy, drawn, several)) > 1
