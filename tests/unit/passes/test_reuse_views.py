"""Views made once: every kernel still gets the same part of the same storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tvm import relax

from mlcpipe.passes.lowering import Lowering, is_op
from mlcpipe.passes.reuse_views import reuse_views
from tests.unit.passes.small import forwards, passes_through, small_llama

BEFORE = passes_through("share_storage")
VIEWS = ("relax.memory.alloc_tensor", "relax.reshape")


@pytest.fixture(scope="module")
def planned() -> Lowering:
    """A llama with storages."""
    return small_llama(BEFORE)


def views(func: relax.Function) -> list[str]:
    """Each view that the function makes: of what, in which shape."""
    values = (binding.value for binding in func.body.blocks[0].bindings)
    return [str(value) for value in values if any(is_op(value, name) for name in VIEWS)]


def kernel_calls(func: relax.Function) -> Iterator[str]:
    """Each kernel with its arguments: a tensor's storage, as what it was allocated, and its shape."""
    place: dict[relax.Expr, str] = {}
    fields: dict[relax.Var, relax.Tuple] = {}
    for binding in func.body.blocks[0].bindings:
        var, value = binding.var, binding.value
        if isinstance(value, relax.Tuple):
            fields[var] = value
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in fields:
            whole = fields[value.tuple_value].fields[value.index]
            place[var] = place.get(whole, str(whole))
        elif isinstance(value, relax.Var):
            place[var] = place.get(value, str(value))
        elif any(is_op(value, name) for name in VIEWS):
            owner = place.get(value.args[0], str(value.args[0])).split()[0]
            place[var] = f"{owner} {var.ty.shape}"
        elif isinstance(value, relax.Call) and hasattr(value.op, "name_hint"):
            yield f"{value.op.name_hint}({', '.join(place.get(one, str(one)) for one in value.args)})"
    yield f"return {place.get(func.body.body, str(func.body.body))}"


def test_kernels_get_the_same_memory(planned: Lowering) -> None:
    after = forwards(reuse_views(planned))
    for name, func in forwards(planned).items():
        assert list(kernel_calls(after[name])) == list(kernel_calls(func))


def test_each_view_is_made_once(planned: Lowering) -> None:
    state = reuse_views(planned)
    relax.analysis.well_formed(state.mod)
    for name, func in forwards(planned).items():
        made = views(forwards(state)[name])
        assert len(made) == len(set(made)) < len(views(func)) / 2
