"""Train the demo model from the files of this folder alone: `python apps/demo_model/train.py`.

Writes `checkpoint/` (config, weights in float16, tokenizer with its chat template). Needs torch and
transformers (the `dev` extra). The seed is fixed; 26 minutes on two busy cores with AVX-512 BF16.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chatml
import corpus
import llama
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

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
    steps: int = 2000
    tokens: int = 3072  # tokens of a batch, with padding
    peak_rate: float = 2e-3
    final_rate: float = 5e-5
    warmup: int = 80
    decay: float = 0.1
    clip: float = 1.0
    asked: float = 0.1  # weight of the questions' tokens in the loss
    prose: float = 0.03  # share of the rows that are prose
    # This share of the short rows ends so many tokens after the last answer begins: answers are few and soon
    # known by heart, finding the right one is what needs many examples.
    cut: float = 0.65
    cut_answer: int = 14
    quantized_from: float = 0.8  # from this share of the steps on, weights are seen through 4 bits


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


@dataclass(frozen=True)
class Batch:
    """ids i64[B, T], and the weight in the loss of predicting each, f32[B, T]; padding has weight 0."""

    ids: torch.Tensor
    weights: torch.Tensor


class Rows:
    """Endless batches: short conversations sorted by length, and long ones that cover the whole context."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe, sampler: corpus.Sampler, seed: int) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._sampler = sampler
        self._random = random.Random(seed)

    def _row(self, length: int) -> chatml.Sample:
        """One row: prose, or a conversation cut to `length` tokens; `length` 0 is one or two turns."""
        if self._random.random() < self._recipe.prose:
            return chatml.encode_prose(self._tokenizer, self._random.choice(self._sampler.knowledge.prose))
        system = chatml.SYSTEM if self._random.random() < 0.85 else self._random.choice(SYSTEMS)
        turns = [(t.question, t.answer) for t in self._sampler.conversation(1 + length // 45)]
        sample = chatml.encode_chat(self._tokenizer, system, turns, self._recipe.asked)
        if not length and self._random.random() < self._recipe.cut:
            length = _last_answer(sample.weights) + self._recipe.cut_answer
        return chatml.Sample(sample.ids[:length], sample.weights[:length]) if length else sample

    def batches(self) -> Iterator[Batch]:
        """Batches with B * T near `recipe.tokens`."""
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


def _last_answer(weights: list[float]) -> int:
    """Where the last run of weight 1 begins, which is the last answer."""
    at = len(weights) - 1
    while weights[at] < 1.0:
        at -= 1
    while weights[at] == 1.0:
        at -= 1
    return at + 1


def _pad(rows: list[chatml.Sample]) -> Batch:
    width = max(len(r.ids) for r in rows)
    ids = torch.tensor([r.ids + [0] * (width - len(r.ids)) for r in rows])
    weights = torch.tensor([r.weights + [0.0] * (width - len(r.weights)) for r in rows])
    return Batch(ids, weights)


def rate(step: int, recipe: Recipe) -> float:
    """Learning rate: linear warm-up, then cosine to `final_rate`."""
    if step < recipe.warmup:
        return recipe.peak_rate * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * 0.5 * (1 + math.cos(math.pi * share))


def loss_of(weights: llama.Weights, shape: llama.Shape, batch: Batch) -> torch.Tensor:
    """Weighted mean cross entropy of the next token."""
    hidden = llama.forward(weights, shape, batch.ids[:, :-1])
    taken = batch.weights[:, 1:] > 0
    scores = llama.logits(weights, hidden[taken])
    losses = torch.nn.functional.cross_entropy(scores, batch.ids[:, 1:][taken], reduction="none")
    return (losses * batch.weights[:, 1:][taken]).sum() / batch.weights[:, 1:].sum()


def train(weights: llama.Weights, shape: llama.Shape, rows: Rows, recipe: Recipe, save: Callable[[], None]) -> None:
    """Run the recipe on `weights` in place; prints a line each 50 steps, and saves ten times."""
    decayed = [w for w in weights.values() if w.dim() > 1]
    plain = [w for w in weights.values() if w.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), eps=1e-8, fused=True)
    batches = rows.batches()
    started, total, seen = time.monotonic(), 0.0, 0
    for step in range(recipe.steps):
        batch = next(batches)
        seen_weights = weights
        if step >= recipe.steps * recipe.quantized_from:
            seen_weights = {k: llama.four_bits(w) if w.dim() > 1 else w for k, w in weights.items()}
        loss = loss_of(seen_weights, shape, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total, seen = total + float(loss.detach()), seen + batch.ids.numel()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1} loss {total / 50:.4f} tokens {seen} {seconds:.0f} s", flush=True)
            total = 0.0
        if (step + 1) % max(1, recipe.steps // 10) == 0:
            save()


def save_checkpoint(weights: llama.Weights, shape: llama.Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face files of a checkpoint to `folder`, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", "utf-8")
    generation = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    chatml.save_tokenizer(tokenizer, folder)


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=corpus.HERE / "checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(steps=arguments.steps)
    tokenizer = chatml.train_tokenizer(tokenizer_texts(recipe.seed))
    shape = llama.Shape(chatml.VOCABULARY, chatml.MAX_POSITIONS)
    weights = llama.initial_weights(shape, recipe.seed)
    print(f"{sum(w.numel() for w in weights.values())} weights", flush=True)
    save = functools.partial(save_checkpoint, weights, shape, tokenizer, arguments.output)
    rows = Rows(tokenizer, recipe, corpus.sampler(recipe.seed), recipe.seed + 1)
    train(weights, shape, rows, recipe, save)
    save()


if __name__ == "__main__":
    main()
