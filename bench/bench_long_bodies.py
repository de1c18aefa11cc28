"""Measures what two bodies of 100,000 messages cost a small request that comes while they are read.

    python -m bench.bench_long_bodies [MODEL] [--messages 100000] [--rounds 5]

The model is the demo model unless one is named. The long conversations exceed its context and are refused in the end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import httpx2

from bench.bench_switch import served
from bench.program import command_line, run_program
from mlcpipe.errors import ResourceError

_SMALL = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
_PATH = "/v1/chat/completions"


async def small_s(client: httpx2.AsyncClient) -> float:
    """Seconds of the small request."""
    began = time.perf_counter()
    answer = await client.post(_PATH, json=_SMALL)
    if answer.status_code != 200:
        raise ResourceError("the small request failed", found=answer.text[:300])
    return time.perf_counter() - began


async def measure(url: str, messages: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of small requests alone, of those beside two long ones, and of the long ones."""
    long = json.dumps({"messages": [{"role": "user", "content": "hi"}] * messages})
    headers = {"content-type": "application/json"}
    alone, beside, long_s = [], [], []

    async def ask_long(client: httpx2.AsyncClient) -> None:
        began = time.perf_counter()
        await client.post(_PATH, content=long, headers=headers)
        long_s.append(time.perf_counter() - began)

    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        await small_s(client)
        for _ in range(rounds):
            alone.append(await small_s(client))
            running = [asyncio.ensure_future(ask_long(client)) for _ in range(2)]
            await asyncio.sleep(0.2)  # their bodies come
            while not all(one.done() for one in running):
                beside.append(await small_s(client))
            await asyncio.gather(*running)
    return alone, beside, long_s


def main() -> None:
    """Parse the command line, measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with served([] if options.model is None else [options.model], ("--threads", "1")) as url:
        alone, beside, long_s = asyncio.run(measure(url, options.messages, options.rounds))
    told: dict[str, Any] = {"small alone": alone, "small beside two long ones": beside, "a long one": long_s}
    for name, seconds in told.items():
        if seconds:
            print(
                f"{name}: median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s, {len(seconds)} requests"
            )


if __name__ == "__main__":
    run_program(main)
