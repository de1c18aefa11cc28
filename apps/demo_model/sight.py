"""Train the demo model that sees, on pictures that are drawn for it: `python apps/demo_model/sight.py PICTURES`.

`sight_data.py` draws the pictures first. The tower learns with a helper that names what is in each of its rows; then
the text learns from the rows; then both together. A run that was stopped continues. Writes `seeing/`, float16.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import chatml
import llama
import numpy as np
import sight_data
import sight_model
import sight_text
import torch
import torch.nn.functional as F
from sight_data import GRID, PATCH, SIDE
from sight_model import AROUND, IMAGE, ROW, WHOLE, helper_loss, scores_of, see
from tokenizers import AddedToken, Tokenizer

HERE = Path(__file__).resolve().parent
SHIFT, ASKS, TESTS = 2, 3, 400
# Pictures a step, and how many of them are recoloured.
TOWER, TEXT, RATE, ROUNDED = (128, 112), (48, 24), 3e-3, 0.9


def train_tokenizer() -> Tokenizer:
    tokenizer = chatml.train_tokenizer(sight_text.texts() * 3, sight_model.VOCABULARY)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (IMAGE, AROUND, WHOLE)])
    return tokenizer


class Pictures(NamedTuple):
    """Pictures u8[N, 48, 48, 3] and their labels f32[N, 3, 4] (kind, colour, x, y)."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def batch(self, rng: random.Random, at: torch.Tensor, shift: int, recoloured: int = 0):
        """Patches bf16[B, 36, 192] of these pictures, moved by up to `shift` pixels; kind, colour and rank of the thing
        in each of the tower's rows, i64[B, 9, 3]; the labels. The first `recoloured` are in colours without a name."""
        dx, dy = rng.randint(-shift, shift), rng.randint(-shift, shift)
        pixels, labels = self.pixels[at], self.labels[at]
        if dx or dy:
            across = (torch.arange(SIDE) - dx).clamp(0, SIDE - 1)
            down = (torch.arange(SIDE) - dy).clamp(0, SIDE - 1)
            pixels = pixels.index_select(1, down).index_select(2, across)
        pixels = torch.cat([recolour(pixels[:recoloured]), pixels[recoloured:]]) if recoloured else pixels
        side, count = SIDE // PATCH, len(at)
        patches = pixels.view(count, side, PATCH, side, PATCH, 3).permute(0, 1, 3, 5, 2, 4).reshape(count, side**2, -1)
        rows = torch.full((count, GRID**2, 3), -1)
        x = ((labels[..., 2] + dx / SIDE) * GRID).long().clamp(0, GRID - 1)
        y = ((labels[..., 3] + dy / SIDE) * GRID).long().clamp(0, GRID - 1)
        picture, rank = torch.nonzero(labels[..., 0] >= 0, as_tuple=True)
        found = labels[picture, rank].long()
        rows[picture, (y * GRID + x)[picture, rank]] = torch.stack([found[:, 0], found[:, 1], rank], 1)
        rows[:recoloured, :, 1] = -1
        return patches.bfloat16().div_(127.5).sub_(1), rows, labels


def recolour(pixels: torch.Tensor) -> torch.Tensor:
    """u8[B, h, w, 3] with each picture's hues turned by 15 to 30 degrees, and paler: colours between those with names.

    So the tower learns a kind apart from its colour: else it learns which pairs never occur.
    """
    count = len(pixels)
    turn = torch.deg2rad((15 + 15 * torch.rand(count, 1, 1)) * torch.randint(0, 2, (count, 1, 1)).mul(2).sub(1))
    across = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / 3**0.5
    grey, strength = torch.tensor([0.3, 0.6, 0.1]).expand(3, 3), torch.rand(count, 1, 1)
    turned = torch.cos(turn) * torch.eye(3) + (1 - torch.cos(turn)) / 3 + torch.sin(turn) * across
    matrix = strength * turned + (1 - strength) * grey
    flat = pixels.flatten(1, 2).bfloat16() @ matrix.transpose(1, 2).bfloat16()
    return flat.clamp_(0, 255).to(torch.uint8).view(pixels.shape)


@functools.lru_cache(40)
def load(path: Path) -> Pictures:
    with np.load(path) as file:
        return Pictures(*(torch.from_numpy(file[name]) for name in ("pixels", "labels")))


@functools.lru_cache(100_000)
def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def conversations(
    rng: random.Random,
    tokenizer: Tokenizer,
    labels: torch.Tensor,
    asks: int,
    *,
    recoloured: int = 0,
    held_out: bool = False,
):
    """Questions about pictures with these labels: ids and taken i64[B, T], and the kinds of the (last) questions.

    Colours of those that are recoloured have random names, which are not taken: a kind does not follow from a colour.
    """
    names = {t for name in sight_data.NAMES for text in (name, f" {name}") for t in _ids(tokenizer, text)}
    around, whole = tokenizer.token_to_id(AROUND), tokenizer.token_to_id(WHOLE)
    begin, end, rows, asked = [around, whole, *[ROW] * GRID**2, around], [2], [], []
    for i, each in enumerate(labels.tolist()):
        things = sight_data.things_of(each)
        if unnamed := i < recoloured:
            things = tuple(replace(t, colour=rng.choice(sight_data.NAMES)) for t in things)
        ids, taken = list(begin), [0] * len(begin)
        for _ in range(asks):
            kind, question, answer = sight_text.ask(rng, things, held_out, unnamed)
            q, a = _ids(tokenizer, question) + end, _ids(tokenizer, answer) + end
            ids, taken = ids + q + a, taken + [0] * len(q) + [int(not (unnamed and t in names)) for t in a]
        rows.append((ids, taken))
        asked.append(kind)
    long = max(len(ids) for ids, _ in rows)
    return (*(torch.tensor([row[i] + [0] * (long - len(row[i])) for row in rows]) for i in (0, 1)), asked)


def examine(w: llama.Weights, tokenizer: Tokenizer, tests: Pictures) -> str:
    """Shares of right rows of the tower, and of right answers (greedy, in whole) by the kinds of questions."""
    rng, every = random.Random(99), torch.arange(len(tests.labels))
    patches, rows, labels = tests.batch(rng, every, 0)
    with torch.no_grad():
        seen = see(w, patches)
        scores = F.linear(seen, w["helper.weight"].bfloat16(), w["helper.bias"].bfloat16())
        there, parts = rows[..., 0] >= 0, scores.split(sight_model.HELPED, -1)
        found = [(part.argmax(-1) == rows[..., i])[there].float().mean() for i, part in enumerate(parts)]
        said = "kind {:.3f} colour {:.3f} rank {:.3f}".format(*found)
        ids, taken, asked = conversations(rng, tokenizer, labels, 1, held_out=True)
        scores, expected = scores_of(w, seen, ids, taken)
    wrong = set(torch.nonzero(taken[:, 1:] > 0)[:, 0][scores.argmax(-1) != expected].tolist())
    right, count = Counter(kind for i, kind in enumerate(asked) if i not in wrong), Counter(asked)
    kinds = " ".join(f"{kind} {right[kind] / count[kind]:.3f} of {count[kind]}" for kind in sorted(count))
    return f"{said}; right {1 - len(wrong) / len(asked):.3f}: {kinds}"


class Optimizers:
    """Muon for matrices between layers, AdamW for all else; and an average of the weights."""

    def __init__(self, w: llama.Weights) -> None:
        inner = [k for k, t in w.items() if t.dim() == 2 and not any(s in k for s in ("embed", "helper"))]
        outer = [t for k, t in w.items() if k not in inner]
        self.muon = torch.optim.Muon([w[k] for k in inner], weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        self.adam = torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.mean = {k: t.detach().clone() for k, t in w.items()}

    def step(self, w: llama.Weights, rate: float, taken: int) -> None:
        torch.nn.utils.clip_grad_norm_([t for t in w.values() if t.grad is not None], 1.0)
        for optimizer in (self.muon, self.adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(0.99, (1 + taken) / (10 + taken))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.values()), [t.detach() for t in w.values()], 1 - keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "seeing")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--tower", type=int, default=2600, help="how many of them teach the tower alone")
    parser.add_argument("--until", help="end before this time of today, HH:MM in UTC")
    parser.add_argument("--export", action="store_true", help="examine and write what the state has, and end")
    a = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, w = train_tokenizer(), sight_model.initial_weights()
    optimizers, step = Optimizers(w), 0
    if a.state.exists():
        kept = torch.load(a.state)
        step, optimizers.mean = kept["step"], kept["mean"]
        optimizers.muon.load_state_dict(kept["muon"])
        optimizers.adam.load_state_dict(kept["adam"])
        with torch.no_grad():
            for name, tensor in kept["weights"].items():
                w[name].copy_(tensor)
    tests = Pictures(*(torch.from_numpy(x) for x in sight_data.draw(random.Random(7), TESTS, held_out=True)))
    if not a.export:
        Run(tokenizer, a.pictures, tests, a.state, a.steps, a.tower, a.until).learn(w, optimizers, step)
    print(examine(optimizers.mean, tokenizer, tests), flush=True)
    sight_model.save(optimizers.mean, tokenizer, a.output)


def seconds_to(until: str) -> float:
    hour, minute = (int(part) for part in until.split(":"))
    now = datetime.now(timezone.utc)
    return (now.replace(hour=hour, minute=minute, second=0) - now).total_seconds()


class Run(NamedTuple):
    """What a run learns from, and when it ends."""

    tokenizer: Tokenizer
    folder: Path
    tests: Pictures
    state: Path
    steps: int
    tower: int
    until: str | None

    def learn(self, w: llama.Weights, optimizers: Optimizers, step: int) -> None:
        """Take steps until they or the time end; the state is kept every 75 seconds."""
        rng, losses, kept, examined = random.Random(step), [], time.monotonic(), time.process_time()
        torch.manual_seed(step)
        while step < self.steps:
            left = min(1.0, seconds_to(self.until) / 1200) if self.until else 1.0
            if left <= 0:
                break
            share = step / self.steps
            rate = RATE * min(1.0, (step + 1) / 40, 0.05 + 2.5 * (1 - share), 0.05 + left)
            made = [self.tower_loss(w, rng)]
            if step >= self.tower:
                made.append(self.text_loss(w, rng, rounded=share > ROUNDED or left < 0.5))
            losses.append(made)
            for loss in made:
                loss.backward()
                optimizers.step(w, rate, step)
            step += 1
            if step % 20 == 0:
                found = " ".join(f"{np.mean([float(loss.detach()) for loss in each]):.3f}" for each in zip(*losses))
                spent = f"{datetime.now(timezone.utc):%H:%M:%S} cpu {time.process_time():.0f} s"
                print(f"step {step} loss of tower and text {found} {spent}", flush=True)
                losses = []
            if time.process_time() - examined > 25:
                print(examine(optimizers.mean, self.tokenizer, self.tests), flush=True)
                examined = time.process_time()
            if time.monotonic() - kept > 75:
                keep(self.state, w, optimizers, step)
                kept = time.monotonic()
        keep(self.state, w, optimizers, step)

    def pictures(self, rng: random.Random, count: int, recoloured: int):
        """Of one file, as `Pictures.batch` returns them; files may come while this runs."""
        given = load(rng.choice(sorted(self.folder.glob("*.npz"))))
        return given.batch(rng, torch.randint(len(given.labels), (count,)), SHIFT, recoloured)

    def tower_loss(self, w: llama.Weights, rng: random.Random) -> torch.Tensor:
        patches, rows, _ = self.pictures(rng, *TOWER)
        known = rows[TOWER[1] :, :, 0]
        known[known >= 0] = sight_model.NOT_ASKED
        return helper_loss(w, see(w, patches), rows)

    def text_loss(self, w: llama.Weights, rng: random.Random, rounded: bool) -> torch.Tensor:
        """Of answers from rows of the tower, which learns nothing of it: or it would learn which pairs never occur."""
        patches, _, labels = self.pictures(rng, *TEXT)
        with torch.no_grad():
            seen = see(w, patches)
        ids, taken, _ = conversations(rng, self.tokenizer, labels, ASKS, recoloured=TEXT[1])
        if rounded:
            w = {k: llama.four_bits(t) if k.startswith("model.") and t.dim() > 1 else t for k, t in w.items()}
        return F.cross_entropy(*scores_of(w, seen, ids, taken))


def keep(path: Path, w: llama.Weights, optimizers: Optimizers, step: int) -> None:
    part = path.with_suffix(".part")
    torch.save({"weights": w, "mean": optimizers.mean, "step": step, "muon": optimizers.muon.state_dict(),
                "adam": optimizers.adam.state_dict()}, part)  # fmt: skip
    part.replace(path)


if __name__ == "__main__":
    main()
