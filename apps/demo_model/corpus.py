"""Make the conversations that the demo model is trained on, from the entries of `knowledge/`.

Every draw comes from a seeded generator, so the same seed gives the same corpus.
`python apps/demo_model/corpus.py` writes `heldout.txt` again, for when an answer or a held-out question has
changed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from chatml import END, PAD, prompt
from facts import Knowledge, read_knowledge
from grammar import draw, normalize, vary

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    keys: tuple[str, ...]


def read_heldout(half: str) -> list[tuple[str, str]]:
    """The held-out questions of `dev` or `test` as (entry name, question), in file order.

    `dev` was looked at while the corpus was written, `test` was not.
    """
    rows = [line.split("\t") for line in (HERE / f"heldout_{half}.tsv").read_text("utf-8").splitlines()]
    return [(name, question) for name, question in rows]


@dataclass
class Sampler:
    """Draws conversations; questions that are held out never come."""

    knowledge: Knowledge
    rng: random.Random
    heldout: frozenset[str]
    topics: tuple[str, ...] = ("",)  # what the names of its entries begin with, apart from those of second turns

    def __post_init__(self) -> None:
        self._names = [name for name in self.knowledge.entries if name.startswith(self.topics)]
        self._weights = list(itertools.accumulate(self.knowledge.entries[n].weight for n in self._names))

    def question(self, grammars: tuple[str, ...]) -> str:
        """One varied question of the grammars."""
        while True:
            # A grammar with more choices says more; the short ones would otherwise drown the others.
            grammar = self.rng.choices(grammars, [1 + min(g.count("|"), 15) for g in grammars])[0]
            text = draw(grammar, self.knowledge.macros, self.rng)
            text = vary(text, self.knowledge.words, self.rng)
            if text and normalize(text) not in self.heldout:
                return text

    def turn(self, name: str) -> Turn:
        """One question and answer of the entry `name`."""
        entry = self.knowledge.entries[name]
        return Turn(self.question(entry.questions), self.rng.choice(entry.answers), entry.keys)

    def followup(self, name: str, previous: Turn) -> Turn | None:
        """A second turn that refers to the entry `name`, if one is written for it."""
        fits = [f for f in self.knowledge.followups if f.after != "*" and name.startswith(f.after)]
        if not fits or self.rng.random() < 0.2:
            fits = [f for f in self.knowledge.followups if f.after == "*"]
        chosen = self.rng.choice(fits)
        question = self.question((chosen.question,))
        if chosen.to == "@repeat":
            return Turn(question, previous.answer, previous.keys)
        if chosen.to:
            entry = self.knowledge.entries[chosen.to]
            return Turn(question, self.rng.choice(entry.answers), entry.keys)
        return Turn(question, chosen.answer, chosen.keys)

    def conversation(self, turns: int) -> list[Turn]:
        """`turns` turns: entries drawn by weight, a third of them followed by a turn that refers to it."""
        out: list[Turn] = []
        while len(out) < turns:
            name = self.rng.choices(self._names, cum_weights=self._weights)[0]
            out.append(self.turn(name))
            if self.rng.random() < 0.3 and len(out) < max(turns, 2):
                follow = self.followup(name, out[-1])
                if follow is not None:
                    out.append(follow)
        return out


def sampler(seed: int, topics: tuple[str, ...] = ("",)) -> Sampler:
    """A sampler of the repository's knowledge of these topics, without the held-out questions."""
    heldout = frozenset(normalize(q) for half in ("dev", "test") for _, q in read_heldout(half))
    return Sampler(read_knowledge(), random.Random(seed), heldout, topics)


def is_right(answer: str, keys: tuple[str, ...]) -> bool:
    """Whether `answer` contains every key phrase, ignoring case."""
    return all(key.lower() in answer.lower() for key in keys)


def heldout_text() -> str:
    """The text of `heldout.txt`: every fourth question of `test` with its answer, then held-out prose."""
    entries = read_knowledge().entries
    chats = [prompt(q) + entries[name].answers[0] + END + "\n" for name, q in read_heldout("test")[::4]]
    return "".join(chats) + PAD + (HERE / "heldout_prose.txt").read_text("utf-8").strip() + "\n"


if __name__ == "__main__":
    (HERE / "heldout.txt").write_text(heldout_text(), "utf-8")
