"""Gemma 4's assistants: logits are those of transformers' own, and no answer changes by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")
pytestmark = pytest.mark.full

from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.draft_heads import with_draft_head
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.nn.layer_head import NEVER
from mlcpipe.runtime.loading import LoadedBundle
from tests.models import tiny
from tests.models.drafted import always_draft, assert_logits_of_drafts, assert_same_answers, compiled

# Layers of both kinds, the full ones with wider heads; the first of them that keep keys are read.
CASE = tiny.TinyCase("gemma4_text", "default")
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="module", autouse=True)
def _all_layers_may_share() -> Iterator[None]:
    """transformers 5.23 refuses the only number of shared layers that its assistants allow: all."""
    usual = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Any) -> Any:
        shared = config.num_kv_shared_layers
        return ["reuse"] * shared if shared == config.num_hidden_layers else usual(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


def assistant(ordered: bool) -> Any:
    """One of random numbers, for the model of `CASE`."""
    model = tiny.tiny_config(CASE)
    text = Gemma4TextConfig(
        vocab_size=model.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=len(LAYERS),
        layer_types=LAYERS, num_attention_heads=4, num_key_value_heads=model.num_key_value_heads,
        head_dim=tiny.SIZES["head_dim"], per_layer_config={"2": {"head_dim": 32}}, sliding_window=model.sliding_window,
        num_kv_shared_layers=len(LAYERS), hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        final_logit_softcapping=None, max_position_embeddings=128, pad_token_id=None,
    )  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=model.hidden_size, use_ordered_embeddings=ordered, num_centroids=16,
        centroid_intermediate_top_k=5,
    )  # fmt: skip
    torch.manual_seed(11)
    made = Gemma4AssistantForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in [*made.named_parameters(), *made.named_buffers()]:
        if parameter.dtype == torch.float32 and not name.endswith("inv_freq"):
            parameter.data = 0.3 * torch.randn_like(parameter) + (0.8 if parameter.ndim == 1 else 0.0)
    if ordered:
        made.masked_embedding.token_ordering.data = torch.randperm(model.vocab_size)
    return made


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.everything)], ids=["clusters", "all"]
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, LoadedBundle]:
    """An assistant, the folder with it and its model's, and both compiled."""
    folder, made = tmp_path_factory.mktemp("assistant"), assistant(request.param)
    made.save_pretrained(folder / "head")
    checkpoint = tiny.write_tiny(CASE, folder / "checkpoint")
    return made, folder, compiled(checkpoint, folder / "head", folder / "bundle")


def drafts(made: Any, model: Any, tokens: list[int], count: int) -> Iterator[Any]:
    """Logits [V] of the next tokens after `tokens`, greedy ones, by transformers."""
    known = model.model(torch.tensor([tokens[:-1]]), use_cache=False, return_shared_kv_states=True)
    hidden, shared = known.last_hidden_state[:, -1:], dict(known.shared_kv_states)
    within = model.config.sliding_window - 1  # the last token is in its window, too
    shared["sliding_attention"] = tuple(one[:, :, -within:] for one in shared["sliding_attention"])
    last = tokens[-1]
    for _ in range(count):
        inputs = torch.cat([model.get_input_embeddings()(torch.tensor([[last]])), hidden], -1)
        found = made(
            inputs_embeds=inputs, position_ids=torch.tensor([[len(tokens) - 1]]), shared_kv_states=shared, use_cache=False
        )  # fmt: skip
        hidden, logits = found.last_hidden_state, found.logits[0, 0].clone()
        if made.config.use_ordered_embeddings:
            logits[logits == logits.min()] = NEVER
        yield logits
        last = int(logits[: tiny.TOKENS].argmax())


@pytest.mark.parametrize("length", [37, 3])
def test_logits_are_those_of_transformers(
    length: int, built: tuple[Any, Path, LoadedBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a window and beyond it."""
    always_draft(monkeypatch)
    made, _, bundle = built
    model = tiny.build_model(CASE, tiny.settled_seed(CASE))

    def expected(tokens: list[int], count: int) -> Iterator[Any]:
        return drafts(made, model, tokens, count)

    assert_logits_of_drafts(bundle, [tiny.prompt_tokens(CASE, length)], expected, monkeypatch)


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_the_same(
    count: int, built: tuple[Any, Path, LoadedBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    assert built[2].manifest.model.assistant is not None
    assert_same_answers(built[2], count)


def test_assistants_of_other_models_are_refused(built: tuple[Any, Path, LoadedBundle], tmp_path: Path) -> None:
    _, folder, _ = built
    source, head = open_checkpoint(folder / "checkpoint"), folder / "head"
    config, (file,) = json.loads((head / "config.json").read_text()), head.glob("*.safetensors")
    tensors = load_file(file)
    name = "masked_embedding.token_ordering"
    twice = {**tensors, name: torch.zeros_like(tensors[name])} if name in tensors else tensors
    for number, (changed, numbers, error, words) in enumerate((
        ({"backbone_hidden_size": 128}, tensors, ConfigError, "backbone_hidden_size.*expected 64, the model's hidden_size"),
        ({"text_config": 3}, tensors, ConfigError, "field text_config.*expected an object"),
        ({"num_centroids": 7, "use_ordered_embeddings": True}, tensors, CheckpointError, "7 equal clusters"),
        ({"use_ordered_embeddings": True}, twice, CheckpointError, "each token below 160 once|16 equal clusters"),
    )):  # fmt: skip
        other = tmp_path / str(number)
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**config, **changed}))
        save_file(numbers, other / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(error, match=words):
            with_draft_head(source, other)
