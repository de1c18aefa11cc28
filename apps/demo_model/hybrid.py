"""Train a second, smaller model that remembers: `python apps/demo_model/hybrid.py`.

Qwen 3.5's architecture in transformers' classes, with the corpus and the tokenizer of the demo model: three layers of
gated delta nets, one of attention, and a layer that drafts (multi-token prediction, DeepSeek-V3 2.2, as
`mlcpipe/nn/next_token.py` defines it). Tests chat with it. Writes `hybrid/`, weights in float16. Needs torch and
transformers (the `dev` extra). A run that was stopped, by --seconds or Ctrl-C, continues.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import chatml
import corpus
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from train import Batch, Recipe, Rows, rate
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5TextModel

RECIPE = Recipe(seed=30, steps=640, tokens=1536, peak_rate=3e-3, warmup=40, prose=0.0)
TOPICS = ("talk.", "con.")
OF_DRAFTS = 0.3  # weight of the drafting layer's loss
SHAPE: dict[str, Any] = {
    "vocab_size": chatml.VOCABULARY,
    "max_position_embeddings": chatml.MAX_POSITIONS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Drafts(torch.nn.Module):
    """The layer that guesses the token after the next, named as in published checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        one = Qwen3_5TextConfig(**{**SHAPE, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        hidden = config.hidden_size
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.inner = Qwen3_5TextModel(one)
        del self.inner.embed_tokens

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Embedded next tokens and hidden states [B, T, hidden] -> [B, T, hidden]."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], -1))
        y: torch.Tensor = self.inner(inputs_embeds=x, use_cache=False).last_hidden_state
        return y


class Hybrid(torch.nn.Module):
    """The model and its drafting layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = Qwen3_5TextConfig(**SHAPE)
        self.model, self.drafts = Qwen3_5ForCausalLM(config), Drafts(config)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted mean cross entropy of the next token, and of the one after it by the drafting layer."""
        embed, head = self.model.get_input_embeddings(), self.model.lm_head
        states = self.model.model(batch.ids[:, :-1], use_cache=False).last_hidden_state
        loss = _loss(head, states, batch, 1)
        guessed = self.drafts(embed(batch.ids[:, 1:-1]), states[:, :-1].detach())
        return loss + OF_DRAFTS * _loss(head, guessed, batch, 2)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights under the names of published checkpoints."""
        renamed = {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}
        for name, tensor in self.drafts.state_dict().items():
            renamed[f"mtp.{name.removeprefix('inner.')}"] = tensor
        return renamed


def _loss(head: torch.nn.Module, states: torch.Tensor, batch: Batch, ahead: int) -> torch.Tensor:
    """Of predicting the tokens that lie so many ahead of those of `states` [B, T - ahead, hidden]."""
    weights = batch.weights[:, ahead:]
    taken = weights > 0
    losses = cross_entropy(head(states[taken]), batch.ids[:, ahead:][taken], reduction="none")
    return (losses * weights[taken]).sum() / weights.sum()


def save_checkpoint(hybrid: Hybrid, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face files of a checkpoint to `folder`, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPE, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "float16"}
    config |= {"rms_norm_eps": hybrid.model.config.rms_norm_eps, "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    generation = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in hybrid.tensors().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    chatml.save_tokenizer(tokenizer, folder)


class Run:
    """The model, its optimizer and how far it is trained; kept in `state`."""

    def __init__(self, state: Path) -> None:
        self.hybrid, self._state, self.steps = Hybrid(RECIPE.seed), state, 0
        parameters = list(self.hybrid.parameters())
        decayed, plain = [w for w in parameters if w.dim() > 1], [w for w in parameters if w.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": RECIPE.decay}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=RECIPE.peak_rate, betas=(0.9, 0.98), fused=True)
        if state.exists():
            saved = torch.load(state, weights_only=True)
            self.hybrid.load_state_dict(saved["weights"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.steps = saved["steps"]

    def save(self) -> None:
        """Keep what a later run continues from."""
        parts = {"weights": self.hybrid.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**parts, "steps": self.steps}, self._state)

    def step(self, batch: Batch) -> float:
        """One step of the optimizer -> its loss, in nats a token."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate(self.steps, RECIPE)
        loss = self.hybrid(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.hybrid.parameters(), RECIPE.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return float(loss.detach())


def main() -> None:
    """Train, or continue, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=corpus.HERE / "hybrid")
    parser.add_argument(
        "--state", type=Path, default=corpus.HERE / "hybrid.state", help="what a later run continues from"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this run")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(corpus.HERE / "checkpoint" / "tokenizer.json"))
    run, began, losses = Run(arguments.state), time.monotonic(), list[float]()
    print(f"{sum(w.numel() for w in run.hybrid.tensors().values())} weights, {run.steps} steps done", flush=True)
    seed = RECIPE.seed + run.steps
    batches = Rows(tokenizer, RECIPE, corpus.sampler(seed, TOPICS), seed).batches()
    try:
        while run.steps < RECIPE.steps and time.monotonic() - began < arguments.seconds:
            losses.append(run.step(next(batches)))
            if run.steps % 25 == 0:
                mean = sum(losses) / len(losses)
                print(f"step {run.steps} loss {mean:.4f} {time.monotonic() - began:.0f} s", flush=True)
                losses.clear()
    finally:
        run.save()
    save_checkpoint(run.hybrid, tokenizer, arguments.output)


if __name__ == "__main__":
    main()
