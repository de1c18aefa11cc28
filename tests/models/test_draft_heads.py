"""Medusa heads: their logits are those of the paper's definition, and no answer changes by them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")
pytestmark = pytest.mark.full

from mlcpipe.bundle.memory import many_sequences
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.core import GREEDY, Core
from mlcpipe.runtime.serving.draft_heads import DraftHeads
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from tests.models import tiny
from tests.models.drafted import (
    CASE,
    CONTEXT,
    VOCAB,
    always_draft,
    assert_drafts_stand,
    assert_same_answers,
    compiled,
)
from tests.models.head_files import HEADS, Tensors, random_heads, write_heads


def head_logits(tensors: Tensors, hidden: Any, head: int) -> Any:
    """W (x + SiLU(V x + b)) for x [m, hidden], with as many blocks as there are."""
    blocks = sum(name.startswith(f"{head}.") and name.endswith("bias") for name in tensors)
    for block in range(blocks):
        weight, bias = (torch.as_tensor(tensors[f"{head}.{block}.linear.{part}"]) for part in ("weight", "bias"))
        hidden = hidden + torch.nn.functional.silu(hidden @ weight.T + bias)
    return hidden @ torch.as_tensor(tensors[f"{head}.{blocks}.weight"]).T


def hidden_states(model: Any, tokens: Any) -> Any:
    """What a transformers model computes its logits from, [batch, tokens, hidden]."""
    return model.model(tokens, use_cache=False).last_hidden_state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(CASE, tmp_path_factory.mktemp("checkpoint"))


def with_heads(checkpoint: Path, folder: Path, tensors: Tensors) -> LoadedBundle:
    return compiled(checkpoint, write_heads(folder / "head", tensors), folder / "bundle")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedBundle:
    return with_heads(checkpoint, tmp_path_factory.mktemp("random"), random_heads(VOCAB))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


@pytest.mark.parametrize("blocks", [1, 2])
def test_logits_are_those_of_the_definition(
    blocks: int, checkpoint: Path, bundle: LoadedBundle, tmp_path: Path
) -> None:
    tensors = random_heads(VOCAB, blocks=blocks)
    if blocks > 1:
        bundle = with_heads(checkpoint, tmp_path, tensors)
    core = Core(bundle, many_sequences(bundle.manifest, bundle.context_length, CONTEXT), Limits(CONTEXT))
    heads = DraftHeads(core)
    model, prompts = tiny.build_model(CASE, tiny.settled_seed(CASE)), [tiny.prompt_tokens(CASE, 9), [5, 4, 3]]
    sequences = [core.scheduler.submit(ScheduledRequest(tuple(prompt), 2, params=GREEDY)) for prompt in prompts]
    for now in itertools.count():
        if (step := core.scheduler.plan(now)) is None:
            break
        core.scheduler.settle(step, core.compute(step), now)
    kept = core.executor.hidden_rows
    assert [kept[one].position for one in sequences] == [9, 3]
    rows = bundle.device.tensor(np.array([kept[one].row for one in sequences], np.int32))
    for head in range(HEADS):
        found = tvm_runtime.array(bundle.device.read(heads.logits(head, rows)))
        for row, one in zip(found, sequences):
            with torch.no_grad():
                expected = head_logits(tensors, hidden_states(model, torch.tensor([one.tokens[:-1]]))[0, -1], head)
            np.testing.assert_allclose(row, expected.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("count", [1, 3, 8])
def test_answers_are_the_same(count: int, bundle: LoadedBundle) -> None:
    assert_same_answers(bundle, count)


def trained_heads(model: Any, tokens: Any, steps: int) -> Tensors:
    """Heads that guess the next tokens of these texts [batch, tokens] from the states of a model."""
    torch.manual_seed(0)
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in random_heads(VOCAB).items()}
    optimizer = torch.optim.Adam(tensors.values(), lr=0.01)
    with torch.no_grad():
        states = hidden_states(model, tokens)
    for _ in range(steps):
        losses = [
            torch.nn.functional.cross_entropy(
                head_logits(tensors, states[:, : -2 - head], head).flatten(0, 1), tokens[:, 2 + head :].flatten()
            )
            for head in range(HEADS)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


@pytest.mark.usefixtures("always")
def test_drafts_of_trained_heads_stand(checkpoint: Path, tmp_path: Path) -> None:
    """Heads that know the greedy answer: nearly all that they draft for it stands."""
    model, prompt = tiny.build_model(CASE, tiny.settled_seed(CASE)), tiny.prompt_tokens(CASE, 20)
    expected = tiny.reference_greedy(CASE, prompt, 40)
    bundle = with_heads(checkpoint, tmp_path, trained_heads(model, torch.tensor([prompt + expected]), 150))
    assert_drafts_stand(bundle, expected)
