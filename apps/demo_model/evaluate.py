"""Measure a demo checkpoint: answers to held-out questions, and the perplexity of held-out text.

`python apps/demo_model/evaluate.py [CHECKPOINT] [--half dev|test]`. A right answer contains every key phrase of its
entry. The questions of `dev` were looked at while the corpus was written; those of `test` were not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chatml
import corpus
import facts
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

LONGEST_ANSWER = 120  # tokens
WINDOW = 512  # tokens of one perplexity window
ASKED = 0.1  # marks the tokens of questions

Array = NDArray[Any]
Predict = Callable[[list[int]], Array]  # ids of T tokens -> logits f32[T, V] after each


@dataclass(frozen=True)
class Judged:
    """One held-out question with what the model said."""

    entry: str
    question: str
    answer: str
    right: bool


def answer_greedily(model: Any, tokenizer: Tokenizer, questions: list[str]) -> list[str]:
    """Greedy answers, generated in one batch with padding on the left."""
    encoded = [tokenizer.encode(chatml.prompt(q)).ids for q in questions]
    width = max(map(len, encoded))
    ids = torch.tensor([[0] * (width - len(e)) + e for e in encoded])
    mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=LONGEST_ANSWER)
    return [tokenizer.decode(row[width:].tolist(), skip_special_tokens=True).strip() for row in out]


def judge(model: Any, tokenizer: Tokenizer, rows: list[tuple[str, str]]) -> list[Judged]:
    """Ask the (entry, question) rows and judge the answers by the key phrases of the entries."""
    entries = facts.read_knowledge().entries
    answers = answer_greedily(model, tokenizer, [q for _, q in rows])
    return [
        Judged(name, question, answer, corpus.is_right(answer, entries[name].keys))
        for (name, question), answer in zip(rows, answers, strict=True)
    ]


def predict_by(model: Any) -> Predict:
    """`Predict` of a transformers model."""

    def predict(ids: list[int]) -> Array:
        with torch.inference_mode():
            logits: Array = model(torch.tensor([ids])).logits[0].float().numpy()
        return logits

    return predict


def losses(predict: Predict, ids: list[int]) -> Array:
    """Negative log-likelihood float64[len(ids) - 1] of every token but the first, given those before it."""
    logits = predict(ids[:-1]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found: Array = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), ids[1:]]
    return found


def perplexity(predict: Predict, tokenizer: Tokenizer, text: str) -> tuple[float, int]:
    """exp(mean negative log-likelihood) of every token of the text in windows of `WINDOW`, and the tokens scored.

    Of a conversation this is mostly the perplexity of the template around the messages, which a host writes and no
    training teaches: see `heldout_perplexity`.
    """
    ids = tokenizer.encode(text).ids
    found = np.concatenate([losses(predict, ids[i : i + WINDOW + 1]) for i in range(0, len(ids) - 1, WINDOW)])
    return float(np.exp(found.mean())), len(found)


def heldout_perplexity(predict: Predict, tokenizer: Tokenizer) -> dict[str, float]:
    """Perplexity of what is learned, on held-out text: `questions` and `answers` of `test`, `prose`, and `all` three.

    The conversations of `heldout_test.tsv`, each with the first answer of its entry, and `heldout_prose.txt`. Tokens
    have weight 1 each; those of the template, which the training loss leaves out, are not scored.
    """
    entries = facts.read_knowledge().entries
    found: dict[str, list[Array]] = {"questions": [], "answers": [], "prose": []}
    for name, question in corpus.read_heldout("test"):
        row = chatml.encode_chat(tokenizer, chatml.SYSTEM, [(question, entries[name].answers[0])], ASKED)
        loss, weights = losses(predict, row.ids), np.array(row.weights[1:])
        found["questions"].append(loss[weights == ASKED])
        found["answers"].append(loss[weights == 1])
    prose = chatml.encode_prose(tokenizer, (corpus.HERE / "heldout_prose.txt").read_text("utf-8").strip())
    found["prose"].append(losses(predict, prose.ids))
    joined = {kind: np.concatenate(parts) for kind, parts in found.items()}
    joined["all"] = np.concatenate(list(joined.values()))
    return {kind: float(np.exp(loss.mean())) for kind, loss in joined.items()}


def round_to_bits(model: Any, bits: int, group: int = 32) -> None:
    """Replace every matrix by what group quantization to `bits` bits reads back (embedding included)."""
    largest = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                groups = parameter.reshape(parameter.shape[0], -1, group)
                scale = (groups.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-8)
                parameter.copy_(((groups / scale).round() * scale).reshape(parameter.shape))


def main() -> None:
    """Print accuracy and perplexity of a checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=corpus.HERE / "checkpoint")
    parser.add_argument("--half", choices=("dev", "test"), default="test")
    parser.add_argument("--bits", type=int, choices=(3, 4, 8), help="judge the weights rounded to so many bits")
    parser.add_argument("--wrong", action="store_true", help="show the wrong answers")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32)
    if arguments.bits:
        round_to_bits(model, arguments.bits)
    judged = judge(model, tokenizer, corpus.read_heldout(arguments.half))
    right = sum(j.right for j in judged)
    print(f"right: {right} of {len(judged)} ({100 * right / len(judged):.1f} %)")
    for one in judged:
        if arguments.wrong and not one.right:
            print(f"  {one.entry} | {one.question}\n    -> {one.answer!r}")
    for kind, value in heldout_perplexity(predict_by(model), tokenizer).items():
        print(f"perplexity of held-out text, {kind}: {value:.4f}")
    value, count = perplexity(predict_by(model), tokenizer, (corpus.HERE / "heldout.txt").read_text("utf-8"))
    print(f"perplexity of heldout.txt with its templates: {value:.3f} over {count} tokens")


if __name__ == "__main__":
    main()
