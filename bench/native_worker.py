"""Measures a bundle in the native runtime's program, in the order of the cells, and prints a line of JSON for each.

    python native_worker.py PROGRAM BUNDLE KIND TOKENS[,TOKENS...] --threads N --repeats N --decode-tokens N

A load is from opening the bundle to the first token, each in a process of its own. Decoding after nothing is
decoding after one token. Unix only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys


def main() -> None:
    """Measure every number of tokens in a process of its own; of memory the most that any of them had."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("bundle")
    parser.add_argument("kind", choices=["prefill", "decode", "load", "memory"])
    parser.add_argument("tokens")
    for name in ("--threads", "--repeats", "--decode-tokens"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    for tokens in map(int, options.tokens.split(",")):
        samples = load(options) if options.kind == "load" else bench(options, tokens)
        print(json.dumps({"kind": options.kind, "tokens": tokens, "samples": samples}))


def load(options: argparse.Namespace) -> list[float]:
    """Seconds; the first is not counted."""
    words = ("-p", "Hi", "--raw", "--max-tokens", 1, "--json")
    seconds: list[float] = [json.loads(run(options, *words))["first_token_s"] for _ in range(options.repeats + 1)]
    return seconds[1:]


def bench(options: argparse.Namespace, tokens: int) -> list[float]:
    """Tokens per second, or bytes."""
    decoded = 2 if options.kind == "prefill" else options.decode_tokens + 1
    said = run(options, "bench", "--prompt-tokens", max(tokens, 1), "--max-tokens", decoded, "--json")
    if options.kind == "memory":
        return [resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024.0]
    return [json.loads(line)[f"{options.kind}_tok_s"] for line in said.splitlines()]


def run(options: argparse.Namespace, *words: object) -> str:
    """The program, greedily, on the bundle. Ends this one with its line where it fails."""
    command = [options.program, *words, "-m", options.bundle, "--threads", options.threads, "--greedy"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip())
    return done.stdout


if __name__ == "__main__":
    main()
