"""The arithmetic of the comparison, and how the runtimes are called: no runtime runs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mlcpipe.errors import ResourceError
from tests.peers import bench_peers
from tests.peers.quiet import run_measured
from tests.peers.report import Memory, Run, compare, markdown
from tests.peers.runners import Cell, Effort, LlamaBench, Mlcpipe

_EFFORT = Effort(threads=2, repeats=3, decode_tokens=32)
_MEMORY = Memory(read_gb_s=40.0, last_cache_bytes=32 << 20, kv_bytes_per_token=1 << 20, decode_tokens=32)
_OURS = Mlcpipe(Path("bundle"), _EFFORT, 1)
_THEIRS = LlamaBench(Path("llama-bench"), Path("model.gguf"), _EFFORT, 1, flash_attention=True)


def _run(number: int, median: float, foreign: float = 0.0) -> Run:
    return Run(number, median, median - 1, median + 1, 1.0, foreign, 0.0, "00:00:00")


def test_ratios_are_of_the_same_round_and_the_faster_opponent() -> None:
    runs = {
        "mlcpipe": [_run(0, 30), _run(1, 20), _run(2, 33)],
        "slow": [_run(0, 10), _run(1, 10), _run(2, 10)],
        "fast": [_run(0, 20), _run(1, 10), _run(2, 30)],
    }
    result = compare(Cell("decode", 16), runs, dict.fromkeys(runs, 1_000_000_000), _MEMORY, 0.1)
    assert result.against == "fast"
    assert result.ratio == (1.5, 1.1, 2.0)
    line = result.lines[0]
    assert (line.median, line.low, line.high) == (30, 19, 34)
    # 30 tok/s of 10^9 bytes of weights and 32 tokens of cache, 1 MiB each
    assert line.gb_s == pytest.approx(30 * (1e9 + 32 * 2**20) / 1e9)
    assert line.share == pytest.approx(line.gb_s / 40.0)


def test_disturbed_runs_do_not_count_unless_there_are_no_others() -> None:
    weights = {"mlcpipe": 10**9, "other": 10**9}
    some = {"mlcpipe": [_run(0, 5, foreign=0.5), _run(1, 30)], "other": [_run(0, 9), _run(1, 9)]}
    result = compare(Cell("prefill", 16), some, weights, _MEMORY, 0.1)
    assert (result.lines[0].median, result.lines[0].quiet) == (30, True)
    assert "\\*" not in markdown([result], {})
    none = {"mlcpipe": [_run(0, 5, foreign=0.5)], "other": [_run(0, 9)]}
    result = compare(Cell("prefill", 16), none, weights, _MEMORY, 0.1)
    assert (result.lines[0].median, result.lines[0].quiet, result.lines[0].share) == (5, False, None)
    assert "5.0\\*" in markdown([result], {})


def test_weights_in_the_cache_have_no_share() -> None:
    runs = {"mlcpipe": [_run(0, 30)], "other": [_run(0, 10)]}
    result = compare(Cell("decode", 0), runs, dict.fromkeys(runs, 1 << 20), _MEMORY, 0.1)
    assert result.lines[0].share is None
    assert result.lines[0].gb_s is not None


def test_both_runtimes_are_asked_for_the_same() -> None:
    ours, theirs = (runner.command(Cell("decode", 1024)) for runner in (_OURS, _THEIRS))
    assert ours[ours.index("--decode-depth") + 1] == theirs[theirs.index("-d") + 1] == "1024"
    assert ours[ours.index("--prefill") + 1] == ""
    assert ours[ours.index("--threads") + 1] == theirs[theirs.index("-t") + 1] == "2"
    assert ours[ours.index("--decode-tokens") + 1] == theirs[theirs.index("-n") + 1] == "32"
    theirs = _THEIRS.command(Cell("prefill", 512))
    assert (theirs[theirs.index("-p") + 1], theirs[theirs.index("-n") + 1]) == ("512", "0")


def test_what_the_runtimes_print_is_read() -> None:
    reading = _THEIRS.parse("a log line\n" + json.dumps({"samples_ts": [30.0, 10.0, 20.0]}) + "\n")
    assert (reading.median, reading.low, reading.high) == (20.0, 10.0, 30.0)
    with pytest.raises(ResourceError, match="1 line"):
        _THEIRS.parse("no result")
    speed = {"median": 2.0, "low": 1.0, "high": 3.0}
    assert _OURS.parse(json.dumps({"results": [{"speed": speed}]})).median == 2.0
    with pytest.raises(ResourceError, match="the context has 8 tokens"):
        _OURS.parse(json.dumps({"results": [{"speed": None, "skipped": "the context has 8 tokens"}]}))


def test_a_command_that_fails_says_its_last_line() -> None:
    assert run_measured([sys.executable, "-c", "print('out')"], timeout_s=60).stdout == "out\n"
    with pytest.raises(ResourceError, match="status 3: why"):
        run_measured([sys.executable, "-c", "import sys; print('a\\nwhy', file=sys.stderr); sys.exit(3)"], timeout_s=60)
    with pytest.raises(ResourceError, match="did not end"):
        run_measured([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.5)


def test_gguf_pairs_neighbours_where_llama_pairs_halves() -> None:
    pytest.importorskip("gguf")
    from tests.peers.make_gguf import _interleaved

    rows = np.arange(8, dtype=np.float32)[:, None]
    assert _interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


_OURS_SAY = {
    "results": [{"speed": {"median": 30.0, "low": 29.0, "high": 31.0}}], "read_gb_s": [40.0, 42.0], "cpu": "a cpu",
    "threads": 2, "versions": {}, "model_type": "llama", "last_cache_bytes": 0, "kv_bytes_per_token": 1,
}  # fmt: skip
_THEIRS_SAY = {"samples_ts": [20.0], "build_number": 1, "build_commit": "abc", "model_n_params": 10**9}


def _printing(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


class _Ours(Mlcpipe):
    def command(self, cell: Cell) -> list[str]:
        return _printing(json.dumps(_OURS_SAY) if cell.tokens < 99 else "no JSON")


class _Theirs(LlamaBench):
    def command(self, cell: Cell) -> list[str]:
        return _printing(json.dumps(_THEIRS_SAY) if cell.tokens < 99 else "no result")


def test_a_cell_that_fails_does_not_lose_the_ones_before(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--prefill", "16", "--depths", "99", "--rounds", "2", "--foreign", "1000", "--output", str(output)]
    options = bench_peers._options(arguments)
    runners = [_Ours(Path("b"), _EFFORT, 1), _Theirs(Path("l"), Path("m"), _EFFORT, 1, flash_attention=False)]
    with pytest.raises(ResourceError, match="no JSON"):
        bench_peers.measure(runners, options)
    (kept,) = json.loads(output.read_text())["comparisons"]
    assert kept["cell"] == {"kind": "prefill", "tokens": 16}
    assert kept["ratio"] == [1.5, 1.5, 1.5]
    assert [len(line["runs"]) for line in kept["lines"]] == [2, 2]
    assert json.loads(output.read_text())["memory"]["read_gb_s"] == 41.0
