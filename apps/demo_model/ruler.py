"""Train the ruler, the model on which quantizations are compared: `python apps/demo_model/ruler.py -o DIR`.

A llama with 26 million weights whose extents 256 divides, trained on documentation from Debian's packages (fetched
with apt). Its weights are never rounded while it learns, so that it flatters no quantization. Writes to DIR:

    checkpoint/      Hugging Face's files, weights in float16
    heldout.txt      text that it was not trained on, to measure with
    calibration.txt  some of the text that it was trained on
    state.pt         what a later run continues from

Needs torch (the `dev` extra) and apt. `--small` is a model of 3 million weights for five minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chatml
import llama
import numpy as np
import ruler_text
import torch
from tokenizers import Tokenizer
from train import save_checkpoint

_POSITIONS = 2048
_CALIBRATION_CHARACTERS = 400_000
_TOKENIZER_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Recipe:
    """Every number of the training run; shares are of its minutes."""

    shape: llama.Shape = llama.Shape(8192, _POSITIONS, hidden=512, inner=1536, layers=7, heads=8, kv_heads=4)
    seed: int = 17
    rows: int = 8  # of a batch
    length: int = 256  # tokens of a row
    peak_rate: float = 1.2e-3
    warmup: float = 0.03
    decay_from: float = 0.5  # from here on the rate falls to 0 in a straight line
    decay: float = 0.1
    clip: float = 1.0
    save_s: float = 120.0


SMALL = Recipe(llama.Shape(2048, _POSITIONS, hidden=256, inner=512, layers=4), peak_rate=3e-3, rows=12)


def rate(share: float, recipe: Recipe) -> float:
    """Learning rate when this share of the minutes has passed: warm-up, constant, linear decay."""
    rising = (share + 1e-3) / recipe.warmup
    falling = (1 - share) / (1 - recipe.decay_from)
    return recipe.peak_rate * max(0.0, min(1.0, rising, falling))


class Rows:
    """Endless batches i64[rows, length + 1] of one stream of tokens, each row from a random place."""

    def __init__(self, tokens: np.ndarray, recipe: Recipe, seed: int) -> None:
        self._tokens, self._recipe = tokens, recipe
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            last = len(self._tokens) - self._recipe.length - 1
            starts = [self._random.randrange(last) for _ in range(self._recipe.rows)]
            rows = [self._tokens[start : start + self._recipe.length + 1] for start in starts]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def prepare(recipe: Recipe, folder: Path, cache: Path) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer, and the tokens to train on, uint16[tokens]; made once, and kept in `folder`."""
    tokenizer_file, tokens_file = folder / "tokenizer.json", folder / "tokens.npy"
    if tokens_file.exists():
        return Tokenizer.from_file(str(tokenizer_file)), np.load(tokens_file)
    ruler_text.download(cache)
    text = ruler_text.read(cache)
    documents = list(text.train)
    random.Random(recipe.seed).shuffle(documents)
    joined = "".join(documents)
    tokenizer = chatml.train_tokenizer([joined[:_TOKENIZER_CHARACTERS]], recipe.shape.vocabulary)
    tokens = [token for document in documents for token in tokenizer.encode(chatml.PAD + document).ids]
    (folder / "heldout.txt").write_text("\n".join(text.held_out), "utf-8")
    (folder / "calibration.txt").write_text(joined[:_CALIBRATION_CHARACTERS], "utf-8")
    tokenizer.save(str(tokenizer_file))
    np.save(tokens_file, np.array(tokens, np.uint16))
    return tokenizer, np.load(tokens_file)


def loss_of(weights: llama.Weights, shape: llama.Shape, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token for ids i64[B, T + 1]."""
    scores = llama.logits(weights, llama.forward(weights, shape, batch[:, :-1]).flatten(0, 1))
    return torch.nn.functional.cross_entropy(scores, batch[:, 1:].flatten())


class Run:
    """Weights and optimizer, and how long they were trained."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self._folder = recipe, folder
        self.weights = llama.initial_weights(recipe.shape, recipe.seed)
        decayed = [w for w in self.weights.values() if w.dim() > 1]
        plain = [w for w in self.weights.values() if w.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.seconds, self.steps = 0.0, 0
        state = folder / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(saved["weights"][name])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.seconds, self.steps = saved["seconds"], saved["steps"]

    def save(self, tokenizer: Tokenizer) -> None:
        """Write the checkpoint, and what a later run continues from."""
        state = {"weights": self.weights, "optimizer": self.optimizer.state_dict(), "seconds": self.seconds}
        part = self._folder / "state.pt.part"
        torch.save({**state, "steps": self.steps}, part)
        part.replace(self._folder / "state.pt")
        save_checkpoint(self.weights, self.recipe.shape, tokenizer, self._folder / "checkpoint")

    def step(self, batch: torch.Tensor, share: float) -> float:
        """One step of the optimizer -> its loss, in nats a token."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate(share, self.recipe)
        loss = loss_of(self.weights, self.recipe.shape, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return float(loss.detach())


def train(run: Run, tokenizer: Tokenizer, tokens: np.ndarray, minutes: float) -> None:
    """Train until the run has taken `minutes` in all, saving now and then; shows a progress bar."""
    recipe, mean = run.recipe, 0.0
    batches = iter(Rows(tokens, recipe, recipe.seed + run.steps))
    last = time.monotonic()
    saved = last
    while (share := run.seconds / (60 * minutes)) < 1:
        loss = run.step(next(batches), share)
        mean = loss if mean == 0.0 else 0.98 * mean + 0.02 * loss
        now = time.monotonic()
        run.seconds, last = run.seconds + now - last, now
        if sys.stdout.isatty() or run.steps % 25 == 0:
            done = int(30 * min(1.0, run.seconds / (60 * minutes)))
            seen = run.steps * recipe.rows * recipe.length / 1e6
            print(
                f"[{'#' * done}{'.' * (30 - done)}] {run.seconds / 60:.1f} of {minutes:g} min, step {run.steps}, "
                f"{seen:.2f} M tokens, loss {mean:.3f}",
                end="\r" if sys.stdout.isatty() else "\n",
                flush=True,
            )
        if now - saved > recipe.save_s:
            run.save(tokenizer)
            saved = now
    run.save(tokenizer)
    print()


def main() -> None:
    """Train, or continue, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=None, help="in all, earlier runs included: 90, small 5")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--packages", type=Path, default=None, help="where the packages are kept: OUTPUT/packages")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = SMALL if arguments.small else Recipe()
    arguments.output.mkdir(parents=True, exist_ok=True)
    cache = arguments.packages or arguments.output / "packages"
    tokenizer, tokens = prepare(recipe, arguments.output, cache)
    run = Run(recipe, arguments.output)
    print(f"{sum(w.numel() for w in run.weights.values()) / 1e6:.1f} M weights, {len(tokens) / 1e6:.1f} M tokens")
    train(run, tokenizer, tokens, arguments.minutes or (5 if arguments.small else 90))


if __name__ == "__main__":
    main()
