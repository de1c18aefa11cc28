"""Train the demo model from the files of this folder alone: `python apps/demo_model/train.py`.

Writes `checkpoint/` (config, weights in float16, tokenizer with its chat template). Needs torch and
transformers (the `dev` extra). The seed is fixed; half an hour on two cores with AVX-512 BF16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.utils.parametrize
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import chatml
import corpus

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer shortly.",
    "You are a friendly assistant. Be brief.",
    "Be concise.",
    "You are an expert in compilers.",
    "You answer questions about mlcpipe.",
    "You are a chat bot.",
    "Answer the user's questions.",
    "You are mlcpipe's assistant.",
    "Speak like a teacher.",
    "Be polite.",
    "",
    "You are a tiny model.",
    "You help users of a command line tool.",
    "Always answer in English.",
)


@dataclass(frozen=True)
class Recipe:
    """Every number of the training run."""

    seed: int = 20
    steps: int = 4000
    tokens: int = 3072  # tokens of a batch, with padding
    peak_rate: float = 2.5e-3
    final_rate: float = 5e-5
    warmup: int = 100
    decay: float = 0.1
    clip: float = 1.0
    asked: float = 0.1  # weight of the questions' tokens in the loss
    prose: float = 0.03  # share of the rows that are prose
    quantized_from: float = 0.75  # from this share of the steps on, weights are seen through 4 bits


def model_config() -> LlamaConfig:
    """A llama of 4.7 million weights: sizes are multiples of 64, heads are grouped two to one."""
    return LlamaConfig(
        vocab_size=chatml.VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=chatml.MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
    )


def tokenizer_texts(seed: int) -> Iterator[str]:
    """The text on which the tokenizer is trained: answers and prose weigh more than questions."""
    sampler = corpus.sampler(seed)
    for _ in range(12000):
        for turn in sampler.conversation(1):
            yield turn.question
    for entry in sampler.knowledge.entries.values():
        for answer in entry.answers:
            yield from [answer] * 20
    for text in sampler.knowledge.prose:
        yield from [text] * 5
    yield from [chatml.SYSTEM, "system\nuser\nassistant\n"] * 500


class Rows:
    """Endless batches: short conversations sorted by length, and long ones that cover the whole context."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._sampler = corpus.sampler(recipe.seed)
        self._random = random.Random(recipe.seed + 1)

    def _row(self, length: int) -> chatml.Sample:
        """One row: prose, or a conversation cut to `length` tokens; `length` 0 is one or two turns."""
        if self._random.random() < self._recipe.prose:
            return chatml.encode_prose(self._tokenizer, self._random.choice(self._sampler.knowledge.prose))
        system = chatml.SYSTEM if self._random.random() < 0.85 else self._random.choice(SYSTEMS)
        turns = [(t.question, t.answer) for t in self._sampler.conversation(1 + length // 45)]
        sample = chatml.encode_chat(self._tokenizer, system, turns, self._recipe.asked)
        return chatml.Sample(sample.ids[:length], sample.weights[:length]) if length else sample

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids i64[B, T], weights f32[B, T]) with B * T near `recipe.tokens`; padding has weight 0."""
        while True:
            pool: list[list[chatml.Sample]] = []
            short = sorted((self._row(0) for _ in range(1200)), key=lambda s: len(s.ids))
            while short:
                count = max(1, self._recipe.tokens // len(short[-1].ids))
                pool.append(short[-count:])
                del short[-count:]
            for length, batches in ((256, 6), (1024, 2)):
                count = self._recipe.tokens // length
                pool += [[self._row(length) for _ in range(count)] for _ in range(batches)]
            self._random.shuffle(pool)
            for rows in pool:
                yield _pad(rows)


def _pad(rows: list[chatml.Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(r.ids) for r in rows)
    ids = torch.tensor([r.ids + [0] * (width - len(r.ids)) for r in rows])
    weights = torch.tensor([r.weights + [0.0] * (width - len(r.weights)) for r in rows])
    return ids, weights


class FourBits(torch.nn.Module):
    """Parametrization: weights as group quantization to 4 bits (32 a group, as q4f16_1) would read them back.

    Gradients pass straight through (Bengio et al. 2013, arXiv:1308.3432), so that the weights settle where
    rounding changes little.
    """

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """f32[N, K] -> f32[N, K]"""
        groups = weight.detach().reshape(weight.shape[0], -1, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-8)
        rounded = ((groups / scale).round().clamp(-7, 7) * scale).reshape(weight.shape)
        return weight + (rounded - weight.detach())


def see_through_four_bits(model: LlamaForCausalLM) -> None:
    """Register `FourBits` on every linear layer and on the embedding, which is also the output layer."""
    for module in list(model.model.modules()):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.utils.parametrize.register_parametrization(module, "weight", FourBits())


def remove_four_bits(model: LlamaForCausalLM) -> None:
    """Undo `see_through_four_bits`; the plain weights stay."""
    for module in model.modules():
        if torch.nn.utils.parametrize.is_parametrized(module):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def rate(step: int, recipe: Recipe) -> float:
    """Learning rate: linear warm-up, then cosine to `final_rate`."""
    if step < recipe.warmup:
        return recipe.peak_rate * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * 0.5 * (1 + math.cos(math.pi * share))


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Weighted mean cross entropy of the next token."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        taken = weights[:, 1:] > 0
        # Not lm_head: it shares the plain embedding, this is the embedding as `FourBits` shows it.
        logits = torch.nn.functional.linear(hidden[taken], model.model.embed_tokens.weight)
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][taken], reduction="none")
    return (losses * weights[:, 1:][taken]).sum() / weights[:, 1:].sum()


def train(
    model: LlamaForCausalLM, rows: Rows, recipe: Recipe, bf16: bool, every: int, save: Path | None
) -> None:
    """Run the recipe; prints a line each `every` steps, and writes a checkpoint to `save` ten times."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), eps=1e-8)
    batches = rows.batches()
    started, total, seen = time.monotonic(), 0.0, 0
    for step in range(recipe.steps):
        if step == int(recipe.steps * recipe.quantized_from):
            see_through_four_bits(model)
        ids, weights = next(batches)
        loss = loss_of(model, ids, weights, bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total, seen = total + float(loss.detach()), seen + ids.numel()
        if (step + 1) % every == 0:
            print(
                f"step {step + 1} loss {total / every:.4f} tokens {seen} {time.monotonic() - started:.0f} s",
                flush=True,
            )
            total = 0.0
        if save is not None and (step + 1) % max(1, recipe.steps // 10) == 0:
            torch.save({k: v.half() for k, v in model.state_dict().items()}, save)
    remove_four_bits(model)


def save_checkpoint(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face files of a checkpoint to `folder`, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    config.update(
        architectures=["LlamaForCausalLM"], dtype="float16", torch_dtype="float16", rope_theta=10000.0
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    tensors = {
        k: v.detach().half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    chatml.save_tokenizer(tokenizer, folder)


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=corpus.HERE / "checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16 autocast (for CPUs without AVX-512 BF16)"
    )
    parser.add_argument("--save", type=Path, help="write the state here ten times during the run")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(steps=arguments.steps)
    torch.manual_seed(recipe.seed)
    tokenizer = chatml.train_tokenizer(tokenizer_texts(recipe.seed))
    model = LlamaForCausalLM(model_config())
    print(
        f"{sum(p.numel() for p in model.parameters())} weights, {tokenizer.get_vocab_size()} tokens",
        flush=True,
    )
    train(model, Rows(tokenizer, recipe), recipe, not arguments.float32, 50, arguments.save)
    save_checkpoint(model, tokenizer, arguments.output)


if __name__ == "__main__":
    main()
