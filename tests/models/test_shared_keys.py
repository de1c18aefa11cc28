"""Layers that read another layer's keys and values: what files may have, too, and which rows prompts compute."""

from __future__ import annotations

from tests.models.small_configs import build

KINDS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")]


def test_keys_that_a_layer_does_not_read_may_be_in_files() -> None:
    model = build("gemma4_text", layer_types=KINDS, num_kv_shared_layers=2)
    unused = {f"layers.{i}.self_attn.{name}." for i in (2, 3) for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
    assert unused <= set(model.names.unused)
    assert not any(name.startswith(tuple(f"model.{one}" for one in unused)) for name, _ in model.named_parameters())
    assert [of.reads for of in model.attentions()] == [None, None, 0, 1]
    assert model.model.last_storing == 1


def test_prompts_compute_all_layers_where_the_last_one_keeps_something() -> None:
    assert build("gemma4_text", layer_types=KINDS).model.last_storing == 3
