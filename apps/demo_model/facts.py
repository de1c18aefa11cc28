"""Read the hand-written files of `knowledge/`: entries, follow-ups, macros and prose.

A line of an entry is `kind: text`: `q` a question grammar, `t` a topic and `c` a verb that the templates
below turn into questions, `a` an answer, `k` the phrases of a right answer, `w` the weight. An entry whose
name has a parameter, such as `{target}`, is made once for each of its values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grammar import CorpusError, Words

FOLDER = Path(__file__).resolve().parent / "knowledge"

# Ways to ask for a definition, for the `t:` (topic) lines; {x} is the topic.
TOPIC = (
    "[what is|what's|what are|what exactly is|what actually is] {x}",
    "[explain|define|describe|please explain|explain to me|clarify] {x}",
    "[tell me about|tell me more about|what do you know about|what can you tell me about|teach me about] {x}",
    "[what does|what do] {x} mean",
    "[what is meant by|what is the meaning of|meaning of|definition of|explanation of|info on] {x}",
    "[can you explain|could you explain|please describe|could you describe|can you tell me about] {x}",
    "i [do not understand|don't understand|have never heard of|want to know more about] {x}",
    "what is {x} [good for|used for|about]",
    "how does {x} work",
    "{x}",
)
# The same for the `c:` (command) lines; {x} is the verb.
COMMAND = (
    "[what does|what is|what's|explain|describe|tell me about] mlcpipe {x} [do|]",
    "what [does|is] the {x} command [do|for|good for]",
    "[how do i|how to|how can i|how should i] use [mlcpipe {x}|the {x} command]",
    "[what is|what's] mlcpipe {x} [for|used for|good for]",
    "[what does|explain] {x} do in mlcpipe",
    "[when|why] do i [need|use] mlcpipe {x}",
    "[example of|example for|usage of|help with|help on] mlcpipe {x}",
    "mlcpipe {x}",
)


@dataclass(frozen=True)
class Entry:
    """One fact: how it is asked (grammars), its answers, and the `keys` that a right answer contains."""

    name: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    keys: tuple[str, ...]
    weight: float


@dataclass(frozen=True)
class FollowUp:
    """A second turn after an entry whose name starts with `after` (`*`: any), and what answers it."""

    after: str
    question: str
    to: str
    answer: str
    keys: tuple[str, ...]


@dataclass
class _Draft:
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Knowledge:
    """All entries of the knowledge files, with parameters expanded."""

    entries: Mapping[str, Entry]
    followups: tuple[FollowUp, ...]
    macros: Mapping[str, str]
    prose: tuple[str, ...]
    words: Words


def read_knowledge(folder: Path = FOLDER) -> Knowledge:
    """Parse the knowledge files of `folder`; CorpusError names a malformed line."""
    macros, sets = _read_macros(folder / "macros.txt")
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.txt")):
        if path.name in ("macros.txt", "words.txt", "follow.txt", "prose.txt"):
            continue
        for draft in _read_entries(path):
            for values in _assignments(draft.name, sets):
                entry = _expand_entry(draft, values, macros)
                if entry.name in entries:
                    raise CorpusError(f"{path.name}: the entry {entry.name} exists twice")
                entries[entry.name] = entry
    followups = tuple(_read_followups(folder / "follow.txt", sets, macros))
    prose = tuple(p.strip() for p in (folder / "prose.txt").read_text("utf-8").split("\n\n") if p.strip())
    return Knowledge(entries, followups, macros, prose, _read_words(folder / "words.txt"))


def _read_words(path: Path) -> Words:
    lists: dict[str, list[str]] = {}
    name = ""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            lists.setdefault(name, []).append(line)
    missing = {"prefixes", "suffixes", "openings", "droppable", "synonyms"} - lists.keys()
    if missing:
        raise CorpusError(f"{path.name}: expected a list [{min(missing)}]")
    return Words(
        tuple(lists["prefixes"]),
        tuple(lists["suffixes"]),
        tuple(lists["openings"]),
        frozenset(" ".join(lists["droppable"]).split()),
        tuple(tuple(group.split("|")) for group in lists["synonyms"]),
    )


def _read_macros(path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    macros: dict[str, str] = {}
    sets: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        kind, _, rest = line.partition(" ")
        name, equals, value = rest.partition(" = ")
        if not equals or kind not in ("def", "set"):
            raise CorpusError(f"{path.name}:{number}: expected `def name = ...` or `set name = ...`, found: {line}")
        if kind == "def":
            macros[name] = value
        else:
            sets[name] = [v.strip() for v in value.split(";")]
    return macros, sets


def _read_entries(path: Path) -> Iterator[_Draft]:
    draft: _Draft | None = None
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if line.startswith("# "):
            if draft is not None:
                yield draft
            draft = _Draft(line[2:].strip())
            continue
        kind, colon, text = line.partition(": ")
        if draft is None or not colon or kind not in ("q", "t", "c", "a", "k", "w"):
            raise CorpusError(f"{path.name}:{number}: expected `q|t|c|a|k|w: text` under `# name`, found: {line}")
        draft.lines.append((kind, text.strip()))
    if draft is not None:
        yield draft


def _assignments(text: str, sets: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """All values of the parameters (`{target}`, `{quant}`, `{family}`) that `text` names."""
    names = [name for name in sets if re.search(rf"\{{{name}(\.\w+)?\}}", text)]
    for values in itertools.product(*(sets[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _fill(text: str, values: Mapping[str, str], macros: Mapping[str, str]) -> str:
    for name, value in values.items():
        named = macros.get(f"{name}.name.{value}", value)
        text = text.replace(f"{{{name}.name}}", named).replace(f"{{{name}}}", value)
    return text


def _expand_entry(draft: _Draft, values: Mapping[str, str], macros: Mapping[str, str]) -> Entry:
    questions: list[str] = []
    answers: list[str] = []
    keys: tuple[str, ...] = ()
    weight = 1.0
    for kind, raw in draft.lines:
        text = _fill(raw, values, macros)
        if kind == "q":
            questions.append(text)
        elif kind == "t":
            questions.extend(pattern.replace("{x}", f"[{text}]") for pattern in TOPIC)
        elif kind == "c":
            questions.extend(pattern.replace("{x}", text) for pattern in COMMAND)
        elif kind == "a":
            answers.append(text.replace("\\n", "\n"))
        elif kind == "k":
            keys = tuple(k.strip() for k in text.split(" | "))
        else:
            weight = float(text)
    name = _fill(draft.name, values, macros)
    if not (questions and answers and keys):
        raise CorpusError(f"entry {name}: needs at least one question, one answer and one key phrase")
    for answer, key in itertools.product(answers, keys):
        if key.lower() not in answer.lower():
            raise CorpusError(f"entry {name}: the key phrase {key!r} is not in its answer")
    return Entry(name, tuple(questions), tuple(answers), keys, weight)


def _read_followups(path: Path, sets: Mapping[str, list[str]], macros: Mapping[str, str]) -> Iterator[FollowUp]:
    for block in path.read_text("utf-8").split("\n\n"):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line.startswith("after "):
                fields["after"] = line[6:].strip()
            else:
                kind, _, text = line.partition(": ")
                fields[kind] = text.strip()
        if not fields:
            continue
        if "q" not in fields or ("to" not in fields and not {"a", "k"} <= fields.keys()):
            raise CorpusError(f"{path.name}: a follow-up needs q, and to or a and k: {block}")
        for values in _assignments(fields["q"], sets):
            filled = {k: _fill(v, values, macros) for k, v in fields.items()}
            keys = tuple(k.strip() for k in filled["k"].split(" | ")) if "k" in filled else ()
            yield FollowUp(filled["after"], filled["q"], filled.get("to", ""), filled.get("a", ""), keys)
