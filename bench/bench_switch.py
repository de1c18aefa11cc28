"""Measures what a request costs whose model takes the memory of another: `mlcpipe serve A B`, where one fits, asked in turn.

    python -m bench.bench_switch [--model llama-1b] [--quantizations q4f16_1,q4f16_m] [--rounds 12] [--json]

Both have random weights, and a tokenizer of as many words as merges as published ones of this size have. The time of a
switch is that of a request for one token after one to the other model, less that of the same request again.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer
from tokenizers.models import BPE

from bench.make_checkpoint import SHAPES, config_of, make_checkpoint
from bench.prepare import default_work
from bench.program import command_line, run_program
from mlcpipe.cli.serve_many import models_of
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.errors import ResourceError
from mlcpipe.loading import prepare_bundle
from mlcpipe.server.load_report import LoadReport

_CONTEXT, _STARTS_S = 2048, 120.0
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def with_words(folder: Path, size: int) -> None:
    """Give the checkpoint's tokenizer words for tokens: each a merge of two earlier ones, as byte-pair encoding has them."""
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    named = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)[:97]
    draw, merges, words = random.Random(1), [], list(_LETTERS)
    known = {*named}
    while len(known) < size:
        pair = draw.choice(words), draw.choice(words)
        word = "".join(pair)
        if word not in known and len(word) <= 12:
            known.add(word)
            words.append(word)
            merges.append(pair)
            named.append(word)
    library = Tokenizer.from_file(str(path))
    library.model = BPE(vocab={word: at for at, word in enumerate(named)}, merges=merges, unk_token="<unk>")
    library.save(str(path))


def bundles_of(model: str, quantizations: Sequence[str], work: Path) -> list[Path]:
    """A bundle for each quantization of one random checkpoint."""
    checkpoint = work / f"{model}-words"
    if not checkpoint.is_dir():
        partial = make_checkpoint(model, work / f"{model}-words-partial", tokenizer=True)
        with_words(partial, config_of(model)["vocab_size"])
        partial.rename(checkpoint)
    return [prepare_bundle(checkpoint, "cpu", one) for one in quantizations]


def one_fits(bundles: Sequence[Path]) -> int:
    """Bytes for the largest of the models as they are planned, which are too few for two."""
    named = [f"m{at}={one}" for at, one in enumerate(bundles)]
    options = ServeOptions(model=named, context=_CONTEXT, sequences=1)
    rooms = []
    for source in models_of(options, (), ()).sources:
        source.prepare(LoadReport())
        rooms.append(source.room().nbytes)
    return max(rooms)


@contextmanager
def served(models: Sequence[object], options: Sequence[object] = ()) -> Iterator[str]:
    """The address of a server of these models; the demo model if there is none."""
    command = [sys.executable, "-m", "mlcpipe", "serve", *map(str, (*models, *options)), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"https?://\S+:\d+(?=  \()", line):
                    yield found[0]
                    return
            raise ResourceError("the server did not start")
        finally:
            process.kill()


def measure(url: str, rounds: int, models: int = 2) -> list[tuple[float, float]]:
    """Seconds of a request after a switch, and of the same one again, for each switch after each model's first load."""
    found = []
    with httpx2.Client(base_url=url, timeout=_STARTS_S) as client:

        def ask(model: str) -> float:
            body: dict[str, Any] = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}
            began = time.perf_counter()
            answer = client.post("/v1/completions", json=body)
            taken = time.perf_counter() - began
            if answer.status_code != 200:
                raise ResourceError("a request failed", found=answer.text[:300])
            return taken

        for number in range(rounds + models):
            name = f"m{number % models}"
            after = ask(name)
            again = statistics.median(ask(name) for _ in range(3))
            if number >= models:
                found.append((after, again))
    return found


def main() -> None:
    """Parse the command line, measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama-1b", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--quantizations", default="q4f16_1,q4f16_m", help="of the two models")
    parser.add_argument("--rounds", type=int, default=12, help="switches that count")
    parser.add_argument("--work", type=Path, default=default_work(), help="folder that keeps the checkpoint")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bundles = bundles_of(options.model, options.quantizations.split(","), options.work)
    room = ("--memory-bytes", one_fits(bundles), "--context", _CONTEXT, "--sequences", 1)
    with served([f"m{at}={one}" for at, one in enumerate(bundles)], room) as url:
        found = measure(url, options.rounds, len(bundles))
    switches = sorted(after - again for after, again in found)
    told = {"median_s": statistics.median(switches), "least_s": switches[0], "most_s": switches[-1],
            "request_s": statistics.median(again for _, again in found), "switches": len(switches)}  # fmt: skip
    if options.json:
        print(json.dumps(told))
        return
    print(
        f"a switch takes {told['median_s']:.3f} s ({told['least_s']:.3f} to {told['most_s']:.3f}, {len(switches)} of them);"
    )
    print(f"a request to the loaded model takes {told['request_s']:.3f} s")


if __name__ == "__main__":
    run_program(main)
