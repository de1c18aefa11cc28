"""The layers that checkpoints ship to draft: logits are those of their definition, and no answer changes by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")
pytestmark = pytest.mark.full

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.core_model_loading import revert_weight_conversion

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.nn import next_token
from mlcpipe.nn.layer_head import NEVER
from mlcpipe.runtime.loading import LoadedBundle
from tests.models import tiny
from tests.models.drafted import always_draft, assert_logits_of_drafts, assert_same_answers, compiled
from tests.unit.checkpoint.gguf_files import write_gguf

# Recurrent layers, whose states after drafted rows are kept, of one kind and beside latent attention; mixtures, with
# plain and with latent attention; layers that slide, by a rope of their own; dense ones, after mixtures, with heads of
# two sizes and sinks.
CASES = {
    "qwen3_5_text": tiny.TinyCase("qwen3_5_text", "default", {"mtp_num_hidden_layers": 1}),
    "glm4_moe": tiny.TinyCase("glm4_moe", "default", {"num_nextn_predict_layers": 1}),
    "glm4_moe_lite": tiny.TinyCase("glm4_moe_lite", "default", {"num_nextn_predict_layers": 1}),
    "exaone_moe": tiny.TinyCase("exaone_moe", "default", {"num_nextn_predict_layers": 1}),
    "mimo_v2_flash": tiny.TinyCase("mimo_v2_flash", "default", {}),
    "bailing_hybrid": tiny.TinyCase("bailing_hybrid", "default", {}),
    "hy_v3": tiny.TinyCase("hy_v3", "default", {"num_nextn_predict_layers": 1}),
    "mellum": tiny.TinyCase("mellum", "default", {}),
}
_NEXTN = {
    **{name: f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "norm": "model.layers.3.shared_head.norm",
    "layers.0": "model.layers.3",
}
_FINAL = {**_NEXTN, "norm": "model.layers.3.final_layernorm"}
_MTP = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm", "layers.0": "mtp.layers.0",
}  # fmt: skip
_MIMO = {
    **{name: f"model.mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "norm": "model.mtp.layers.0.final_layernorm",
    "layers.0": "model.mtp.layers.0",
}
NAMES = {
    "qwen3_5_text": _MTP, "glm4_moe": _NEXTN, "glm4_moe_lite": _NEXTN, "exaone_moe": _MTP, "mimo_v2_flash": _MIMO,
    "bailing_hybrid": _FINAL, "hy_v3": _FINAL, "mellum": _MTP,
}  # fmt: skip
ONE_LAYER: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["full_attention"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "exaone_moe": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    "bailing_hybrid": {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0},
    "hy_v3": {"mlp_layer_types": ["sparse"]},
    "mellum": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]},
}


ONE_ORDER = {"qwen3_5_text": {"linear_num_value_heads": 2}}  # of value heads, which files have in turn


class Head:
    """The definition: all entries of one sequence at once, through transformers' own layer."""

    def __init__(self, case: tiny.TinyCase, known: int) -> None:
        """Of the first `known` tokens alone."""
        torch.manual_seed(5)
        self.known = known
        self.model = tiny.build_model(case, tiny.settled_seed(case))
        fields = {**self.model.config.to_dict(), "num_hidden_layers": 1, **ONE_LAYER[case.model_type]}
        config = AutoConfig.for_model(**{**fields, "attn_implementation": "eager"})
        self.layer = AutoModel.from_config(config, attn_implementation="eager").float().eval()
        norm, hidden = type(self.layer.norm), config.hidden_size
        self.enorm, self.hnorm = norm(hidden, config.rms_norm_eps), norm(hidden, config.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        for module in (self.enorm, self.hnorm, self.eh_proj, self.layer):
            for parameter in module.parameters():
                parameter.data = 0.3 * torch.randn_like(parameter) + (0.2 if parameter.ndim == 1 else 0.0)

    def tensors(self, names: dict[str, str]) -> dict[str, Any]:
        """Under the checkpoint's names."""
        of_layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.layers[0].state_dict().items()}
        parts = {"enorm": self.enorm, "hnorm": self.hnorm, "eh_proj": self.eh_proj, "norm": self.layer.norm}
        tensors = {f"{name}.weight": part.weight for name, part in parts.items()}
        tensors |= revert_weight_conversion(self.layer, of_layer)
        owns = {name: next(own for own in names if name.startswith(f"{own}.")) for name in tensors}
        found = {
            names[own] + name.removeprefix(own): tensors[name].detach().clone().contiguous()
            for name, own in owns.items()
        }
        changed = ("post_attention", "pre_mlp") if names is _MIMO else ("", "")
        return {name.replace(*changed): tensor for name, tensor in found.items()}

    def drafts(self, tokens: list[int], count: int) -> Iterator[Any]:
        """Logits [V] of the next tokens after `tokens`, greedy ones."""
        states = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        text = list(tokens[1:])
        for _ in range(count):
            embedded = self.enorm(self.model.get_input_embeddings()(torch.tensor(text)))
            x = self.eh_proj(torch.cat([embedded, self.hnorm(states)], -1))
            y = self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
            logits = self.model.lm_head(y)
            logits[self.known :] = NEVER
            yield logits
            states, text = torch.cat([states, y[None]]), [*text, int(logits[: tiny.TOKENS].argmax())]


def add_head(checkpoint: Path, head: Head, names: dict[str, str]) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    save_file({**load_file(file), **head.tensors(names)}, file, metadata={"format": "pt"})


USUAL = ("bailing_hybrid", "mellum")
HEADS = [
    *(pytest.param((name, False), marks=() if name in USUAL else pytest.mark.everything) for name in CASES),
    ("qwen3_5_text", True),
]


@pytest.fixture(scope="module", params=HEADS, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Head, LoadedBundle]:
    """A head, and its checkpoint compiled; of the first quarter of the tokens, as of large vocabularies."""
    name, quarter = request.param
    case, folder = CASES[name], tmp_path_factory.mktemp("own")
    head, checkpoint = Head(case, 32 if quarter else 160), tiny.write_tiny(case, folder / "checkpoint")
    add_head(checkpoint, head, NAMES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(next_token, "_WHOLE", 100 if quarter else 160)
        return head, compiled(checkpoint, None, folder / "bundle")


@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe", "hy_v3"])
def test_a_gguf_file_has_it(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], overrides={**CASES[name].overrides, **ONE_ORDER.get(name, {})})
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    add_head(checkpoint, Head(case, 160), NAMES[name])
    source = open_checkpoint(checkpoint)
    if name == "qwen3_5_text":  # llama.cpp's converter counts it as these layers
        source = replace(source, config={**source.config, "num_nextn_predict_layers": 1})
    found = open_checkpoint(write_gguf(source, tmp_path / "model.gguf"))
    assert found.draft_head is not None
    assert [*found.tensors] == [*source.tensors]
    for tensor in found.tensors:
        value = source.read(tensor)
        np.testing.assert_allclose(found.read(tensor).reshape(value.shape), value, rtol=0, atol=1e-6, err_msg=tensor)


def test_logits_are_those_of_the_definition(built: tuple[Head, LoadedBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    head, bundle = built
    prompts = [[int(word) for word in np.random.default_rng(0).integers(3, tiny.TOKENS, 37)], [5, 4, 3]]
    assert_logits_of_drafts(bundle, prompts, head.drafts, monkeypatch)


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_the_same(count: int, built: tuple[Head, LoadedBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    assert_same_answers(built[1], count)
