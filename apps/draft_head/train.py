"""Train a draft head for a checkpoint: `python apps/draft_head/train.py CHECKPOINT --text FILE -o FOLDER`.

An EAGLE-3 head learns to guess tokens from its own guesses, too: at depth k of the unrolled loss a row attends to the
model's hidden states up to where its draft began, then to what the head said at depths 1 to k (Li et al. 2025,
arXiv:2503.01840, section 3.2). Medusa heads (Cai et al. 2024, arXiv:2401.10774) each guess one token from the model's
last hidden state. The model itself does not change. The text should be like what the model will write, best of all
answers of its own. Needs the `distill` extra; runs on the CPU, or with --device on another of torch's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModelForCausalLM

from mlcpipe.checkpoint import open_checkpoint, resolve
from mlcpipe.checkpoint.checkpoint import SINGLE_FILE
from mlcpipe.compiler.calibration.text import read_calibration
from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.atomic import atomic_directory, check_early
from mlcpipe.support.progress import Progress, console_progress

_HELD_OUT = 0.1  # of the text, its end: the result is measured on it
_STAGES = 10  # of the run, each with the mean loss of the one before
_DEPTH_DECAY = 0.8  # of a depth's weight in the loss against the one before


class Norm(nn.Module):
    """x / rms(x) * weight, as Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """The parameters of the layer, named as in the authors' checkpoints."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, width, dim, eps = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["rms_norm_eps"]
        q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        self.self_attn, self.mlp = nn.ModuleDict(), nn.ModuleDict()
        for name, sizes in {"q": (2 * h, q), "k": (2 * h, kv), "v": (2 * h, kv), "o": (q, h)}.items():
            self.self_attn[f"{name}_proj"] = nn.Linear(*sizes, bias=False)
        for name, sizes in {"gate": (h, width), "up": (h, width), "down": (width, h)}.items():
            self.mlp[f"{name}_proj"] = nn.Linear(*sizes, bias=False)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (Norm(h, eps) for _ in range(3))


class Eagle(nn.Module):
    """The head; `losses` unrolls it."""

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor) -> None:
        super().__init__()
        self.config = c = config
        h = c["hidden_size"]
        self.fc, self.lm_head = nn.Linear(3 * h, h, bias=False), nn.Linear(h, c["vocab_size"], bias=False)
        self.midlayer, self.norm = Block(c), Norm(h, c["rms_norm_eps"])
        self.register_buffer("embedding", embedding, persistent=False)

    def losses(self, tokens: torch.Tensor, states: list[torch.Tensor], depth: int) -> Iterator[tuple[Any, Any]]:
        """tokens [b, t] and the inputs of all layers -> of each depth logits [b, m, V] and the tokens [b, m] after."""
        m = tokens.shape[1] - 1 - depth
        x = self.fc(torch.cat([states[i] for i in self.config["eagle_aux_hidden_state_layer_ids"]], -1))[:, :m]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for at in range(depth):
            x = self._layer(self.embedding[tokens[:, 1 + at : 1 + at + m]], x, at, keys, values)
            yield self.lm_head(self.norm(x)), tokens[:, 2 + at : 2 + at + m]

    def _layer(self, embedded: Any, x: Any, at: int, keys: list[Any], values: list[Any]) -> torch.Tensor:
        """The layer at a depth; its keys and values are added to those of the depths before."""
        layer, attn = self.midlayer, self.midlayer.self_attn
        (b, m, _), dim = x.shape, self.config["head_dim"]
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], -1)
        q, k, v = (attn[f"{part}_proj"](both).view(b, m, -1, dim) for part in "qkv")
        positions = torch.arange(m, device=x.device) + at
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        groups = q.shape[2] // k.shape[2]
        keys.append(k.repeat_interleave(groups, 2))
        values.append(v.repeat_interleave(groups, 2))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys[0])
        future = torch.ones(m, m, dtype=torch.bool, device=x.device).triu(1)
        own = [torch.einsum("bihd,bihd->bhi", q, key)[..., None] for key in keys[1:]]
        weights = torch.cat([scores.masked_fill(future, -torch.inf), *own], -1).mul(dim**-0.5).softmax(-1)
        y = torch.einsum("bhij,bjhd->bihd", weights[..., :m], values[0])
        for index, value in enumerate(values[1:]):
            y = y + weights[..., m + index].transpose(1, 2)[..., None] * value
        x = x + attn["o_proj"](y.reshape(b, m, -1))
        y = layer.post_attention_layernorm(x)
        return x + layer.mlp["down_proj"](silu(layer.mlp["gate_proj"](y)) * layer.mlp["up_proj"](y))

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


class Medusa(nn.Module):
    """Heads of one block each."""

    def __init__(self, hidden: int, output: torch.Tensor, heads: int) -> None:
        super().__init__()
        self.medusa_head = nn.ModuleList()
        for _ in range(heads):
            block, last = nn.Module(), nn.Linear(*output.shape[::-1], bias=False)
            block.linear = nn.Linear(hidden, hidden)
            nn.init.zeros_(block.linear.weight)  # as the authors: a head begins as the model's own
            nn.init.zeros_(block.linear.bias)
            last.weight.data.copy_(output)
            self.medusa_head.append(nn.ModuleList([block, last]))

    def losses(self, tokens: torch.Tensor, states: list[torch.Tensor], depth: int) -> Iterator[tuple[Any, Any]]:
        """As `Eagle.losses`, with a head for each depth; the last of `states` is what the model's logits come from."""
        m = tokens.shape[1] - 1 - depth
        for at, (block, last) in zip(range(depth), self.medusa_head):
            x = states[-1][:, :m]
            yield last(x + silu(block.linear(x))), tokens[:, 2 + at : 2 + at + m]


def build(kind: str, model: Any, depth: int) -> tuple[nn.Module, dict[str, Any]]:
    """A new head for a transformers model, and its config.json. Raises UsageError for a model with too few layers."""
    c, embedding = model.config, model.get_input_embeddings().weight.detach()
    if kind == "medusa":
        output = model.get_output_embeddings().weight.detach()
        return Medusa(c.hidden_size, output, depth), {"medusa_num_heads": depth}
    n = c.num_hidden_layers
    layers = sorted({min(2, n - 1), n // 2, max(n - 3, 0)})
    layers = layers if len(layers) == 3 else sorted({0, n // 2, n - 1})
    if len(layers) < 3:
        raise UsageError("the model has too few layers for an EAGLE-3 head", expected="at least 3", found=n)
    theta = (getattr(c, "rope_parameters", None) or {}).get("rope_theta") or getattr(c, "rope_theta", 1e4)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "vocab_size": c.vocab_size,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, "rope_theta": theta,
        "rms_norm_eps": c.rms_norm_eps, "max_position_embeddings": c.max_position_embeddings, "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": layers,
    }  # fmt: skip
    head = Eagle(config, embedding)
    head.lm_head.weight.data.copy_(model.get_output_embeddings().weight)
    return head, config


def train(head: nn.Module, model: Any, tokens: torch.Tensor, options: argparse.Namespace, progress: Progress) -> None:
    """Train the head in place on random rows of the tokens i64[n]."""
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    stage, losses = max(1, options.steps // _STAGES), list[float]()
    for step in range(options.steps):
        if step % stage == 0:
            shown = f", loss {sum(losses) / len(losses):.3f}" if losses else ""
            progress.stage(f"step {step} of {options.steps}{shown}")
            progress.steps_total(min(stage, options.steps - step))
            losses.clear()
        starts = torch.randint(0, len(tokens) - options.window, (options.rows,), generator=generator)
        batch = torch.stack([tokens[start : start + options.window] for start in starts.tolist()]).to(model.device)
        unrolled = enumerate(head.losses(batch, _states(model, batch), options.depth))
        loss = sum(_DEPTH_DECAY**at * cross_entropy(y.flatten(0, 1), next_.flatten()) for at, (y, next_) in unrolled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        progress.advance(1)


def _states(model: Any, batch: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model.model(batch, use_cache=False, output_hidden_states=True).hidden_states)


def right(head: nn.Module, model: Any, tokens: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """For each depth, how often the head guesses the model's most probable token, on held-out tokens."""
    rows = tokens.unfold(0, options.window, options.window)[:16].to(model.device)
    found = [0.0] * options.depth
    with torch.no_grad():
        says = model(rows, use_cache=False).logits.argmax(-1)
        for at, (logits, _) in enumerate(head.losses(rows, _states(model, rows), options.depth)):
            found[at] = float((logits.argmax(-1) == says[:, 1 + at : 1 + at + logits.shape[1]]).float().mean())
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", help="a folder, or hf://org/name")
    parser.add_argument(
        "--text", default="own", help="a text in UTF-8 like what the model writes (default: one of ours)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--kind", choices=("eagle", "medusa"), default="eagle")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a draft that it learns; heads of Medusa")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--window", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="a device of torch's")
    parser.add_argument("--overwrite", action="store_true", help="replace a head")
    options = parser.parse_args()
    try:
        with console_progress(Console(stderr=True), lasting=False) as progress:
            rates = run(options, progress)
    except MlcpipeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print(f"{options.output}: right where all before are, by depth: {', '.join(f'{rate:.0%}' for rate in rates)}")
    return 0


def run(options: argparse.Namespace, progress: Progress) -> list[float]:
    """Train and save a head -> `right`. Raises UsageError, and what readers of checkpoints raise."""
    replaces = SINGLE_FILE if options.overwrite else ""
    check_early(options.output, replaces)
    checkpoint = open_checkpoint(resolve(options.checkpoint, progress))
    tokenizer = Tokenizer.load(
        checkpoint.folder, generation_config=checkpoint.generation_config, config=checkpoint.config
    )
    tokens = torch.tensor(tokenizer.encode(read_calibration(options.text).text, add_special_tokens=False))
    cut = int(len(tokens) * (1 - _HELD_OUT))
    if len(tokens) - cut < options.window or options.window <= options.depth + 1 or options.depth < 1:
        raise UsageError(
            "the text is too short", where=options.text, found=f"{len(tokens)} tokens",
            expected=f"at least {math.ceil(options.window / _HELD_OUT)}, and windows longer than a draft",
        )  # fmt: skip
    progress.stage("load the model")
    torch.manual_seed(options.seed)
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    model = auto.from_pretrained(checkpoint.folder, dtype=torch.float32).to(options.device).eval()
    head, config = build(options.kind, model, options.depth)
    train(head.to(options.device), model, tokens[:cut], options, progress)
    with atomic_directory(options.output, replaces=replaces) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file({name: part.cpu().contiguous() for name, part in head.state_dict().items()}, folder / SINGLE_FILE)
    return right(head, model, tokens[cut:], options)


if __name__ == "__main__":
    sys.exit(main())
