"""The arithmetic of the comparison, and how the runtimes are called: no runtime runs here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench import bench_peers, bench_web, report
from bench.busy_core import fair_share, hogs
from bench.goals import GOALS, goals_document
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.prepare import Subject, subject
from bench.quiet import Measured, run_measured
from bench.report import Comparison, Run, Traffic, compare, document, markdown, merge
from bench.runners import Cell, Effort, LlamaBench, Mlcpipe, OpenVino, Reading
from bench.web_runners import Browser, WebEffort, WebRunner, runners_of
from mlcpipe.bundle import Manifest
from mlcpipe.errors import ResourceError, UsageError

_EFFORT = Effort(threads=2, repeats=3, decode_tokens=32)
_OURS = Mlcpipe(Path("bundle"), _EFFORT, 1)
_THEIRS = LlamaBench(Path("llama-bench"), Path("model.gguf"), _EFFORT, 1, flash_attention=True)
_OTHERS = OpenVino(Path("python"), Path("model"), _EFFORT, 1)
_DECODE = Cell("decode", 16)
_PEERS = {"mlcpipe": "mlcpipe", "slow": "peer", "fast": "peer", "other": "another"}


def _run(number: int, median: float, foreign: float = 0.0, read_gb_s: float = 40.0, share: float | None = None) -> Run:
    reading = Reading(median, median - 1, median + 1)
    return Run(number, reading, 1.0, foreign, 0.0, "00:00:00", (read_gb_s, read_gb_s), share)


def _compare(cell: Cell, runs: dict[str, list[Run]], weights: int = 10**9) -> Comparison:
    traffic = Traffic(dict.fromkeys(runs, weights), dict.fromkeys(runs, 2**20), 32, 32 << 20)
    return compare(("llama-1b", "q4f16_1", 4), cell, runs, _PEERS, traffic, 0.1)


def test_ratios_are_of_the_same_round_and_the_faster_variant() -> None:
    runs = {
        "mlcpipe": [_run(0, 30), _run(1, 20), _run(2, 33, read_gb_s=80.0)],
        "slow": [_run(0, 10), _run(1, 10), _run(2, 10)],
        "fast": [_run(0, 20), _run(1, 10), _run(2, 30)],
        "other": [_run(0, 60)],
    }
    result = _compare(_DECODE, runs)
    assert result.ratios == {"peer": (1.5, 1.1, 2.0), "another": (0.5, 0.5, 0.5)}
    line = result.lines[0]
    assert (line.median, line.low, line.high) == (30, 19, 34)
    # A token reads 10^9 bytes of weights and 32 tokens of cache, 1 MiB each; of 40 GB/s in two rounds, 80 in one.
    assert line.share == pytest.approx(30 * (1e9 + 32 * 2**20) / 1e9 / 40)


def test_runtimes_are_told_which_device() -> None:
    ours = Mlcpipe(Path("bundle"), _EFFORT, 1, "vulkan:1").command([_DECODE])
    assert ours[-2:] == ["--device", "vulkan:1"] and "--device" not in _OURS.command([_DECODE])
    theirs = LlamaBench(Path("llama-bench"), Path("model.gguf"), _EFFORT, 1, True, device=1).command([_DECODE])
    assert theirs[:3] == ["env", "GGML_VK_VISIBLE_DEVICES=1", "llama-bench"]
    assert [command[command.index("-ngl") + 1] for command in (theirs, _THEIRS.command([_DECODE]))] == ["99", "0"]


def test_our_share_is_what_our_process_says() -> None:
    runs = {"mlcpipe": [_run(0, 30, share=0.9), _run(1, 60, share=0.8)], "fast": [_run(0, 20), _run(1, 30)]}
    ours, theirs = _compare(_DECODE, runs, weights=10**9).lines
    assert ours.share == pytest.approx(0.85)
    assert theirs.share == pytest.approx(25 * (1e9 + 32 * 2**20) / 1e9 / 40)


def test_where_less_is_better_the_ratio_is_the_other_way_round() -> None:
    runs = {"mlcpipe": [_run(0, 2)], "slow": [_run(0, 8)], "fast": [_run(0, 3)]}
    result = _compare(Cell("load", 1), runs)
    assert result.ratios == {"peer": (1.5, 1.5, 1.5)}
    assert result.lines[0].share is None


def test_disturbed_runs_do_not_count_unless_there_are_no_others() -> None:
    some = {"mlcpipe": [_run(0, 5, foreign=0.5), _run(1, 30)], "other": [_run(0, 9), _run(1, 9)]}
    result = _compare(_DECODE, some)
    assert (result.lines[0].median, result.lines[0].quiet) == (30, True)
    assert "\\*" not in markdown(document([result], {}))
    none = {"mlcpipe": [_run(0, 5, foreign=0.5)], "other": [_run(0, 9)]}
    result = _compare(_DECODE, none)
    assert (result.lines[0].median, result.lines[0].quiet) == (5, False)
    assert "5.0\\*" in markdown(document([result], {}))


def test_weights_in_the_cache_have_no_share() -> None:
    runs = {"mlcpipe": [_run(0, 30)], "other": [_run(0, 10)]}
    assert _compare(_DECODE, runs, weights=1 << 20).lines[0].share is None


def test_the_table_is_made_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"mlcpipe": [_run(0, 30)], "slow": [_run(0, 10)], "fast": [_run(0, 20)]}
    second = {"mlcpipe": [_run(0, 600)], "other": [_run(0, 400)]}
    results = [_compare(_DECODE, first), _compare(Cell("prefill", 512), second)]
    file = tmp_path / "result.json"
    content = {"circumstances": {"cpu": "a cpu"}, "comparisons": []}
    for result in results:  # what a later command adds
        content = merge(content, json.loads(json.dumps(document_of(result))))
    file.write_text(json.dumps(content), encoding="utf-8")
    assert report.main([str(file)]) == 0
    shown = capsys.readouterr().out
    assert "- cpu: a cpu" in shown and "llama-1b, 4-bit weights (q4f16_1):" in shown
    assert "| decode, depth 16, tok/s | 30.0 | 78 % | 20.0 (fast, 52 %) | 1.50 (1.50 - 1.50) |  |  |" in shown
    assert "| prefill 512, tok/s | 600 |  |  |  | 400 (other) | 1.50 (1.50 - 1.50) |" in shown
    again = merge(content, document_of(_compare(_DECODE, {**first, "mlcpipe": [_run(0, 60)]})))
    assert len(again["comparisons"]) == 2 and "| 60.0 |" in markdown(json.loads(json.dumps(again)))


def document_of(result: Comparison) -> dict[str, Any]:
    return document([result], {})


def test_all_runtimes_are_asked_for_the_same() -> None:
    cells = [Cell("decode", 0), Cell("decode", 1024)]
    ours, theirs, others = (runner.command(cells) for runner in (_OURS, _THEIRS, _OTHERS))
    assert ours[ours.index("--decode-depth") + 1] == theirs[theirs.index("-d") + 1] == "0,1024"
    assert others[others.index("decode") + 1] == "0,1024"
    assert ours[ours.index("--prefill") + 1] == ""
    assert ours[ours.index("--threads") + 1] == theirs[theirs.index("-t") + 1] == others[others.index("--threads") + 1]
    assert ours[ours.index("--decode-tokens") + 1] == theirs[theirs.index("-n") + 1] == "32"
    theirs = _THEIRS.command([Cell("prefill", 512)])
    assert (theirs[theirs.index("-p") + 1], theirs[theirs.index("-n") + 1]) == ("512", "0")


def test_what_the_runtimes_print_is_read() -> None:
    cell = Cell("decode", 0)
    line = {"samples_ts": [30.0, 10.0, 20.0], "n_prompt": 0, "n_depth": 0}
    output = _THEIRS.parse("a log line\n" + json.dumps(line) + "\n", [cell])
    assert output.readings[cell] == Reading(20.0, 10.0, 30.0)
    with pytest.raises(ResourceError, match="no result"):
        _THEIRS.parse("nothing\n", [cell])
    line = {"kind": "decode", "tokens": 0, "samples": [3.0, 1.0]}
    assert _OTHERS.parse(json.dumps(line), [cell]).readings[cell].median == 2.0
    with pytest.raises(ResourceError, match="no result"):
        _OTHERS.parse(json.dumps(line), [cell, Cell("decode", 8)])
    output = _OURS.parse(json.dumps(_said("decode", 0)), [cell])
    assert output.readings[cell].median == 30.0 and output.read_gb_s == (40.0, 42.0) and output.shares == {cell: 0.5}
    with pytest.raises(ResourceError, match="the context has 8 tokens"):
        _OURS.parse(json.dumps({"results": [{"speed": None, "skipped": "the context has 8 tokens"}]}), [cell])


def test_batches_are_asked_for_and_read() -> None:
    cells = [Cell("batch", 1), Cell("batch", 8)]
    assert _OURS.command(cells)[-2:] == ["--batch", "1,8"]
    command = _THEIRS.command(cells)
    assert command[0] == "llama-batched-bench" and command[command.index("-npl") + 1] == "1,1,1,8,8,8"
    lines = [{"pl": 1, "speed_tg": speed} for speed in (10.0, 30.0, 20.0)] + [{"pl": 8, "speed_tg": 80.0}]
    readings = _THEIRS.parse("\n".join(map(json.dumps, lines)), cells).readings
    assert readings == {cells[0]: Reading(20.0, 10.0, 30.0), cells[1]: Reading(80.0, 80.0, 80.0)}
    with pytest.raises(ResourceError, match="no result"):
        _THEIRS.parse(json.dumps(lines[0]), cells)


def test_load_and_memory_are_read() -> None:
    load, memory = Cell("load", 1), Cell("memory", 64)
    said = {**_said("prefill", 64), "first_token_s": {"median": 0.1, "low": 0.1, "high": 0.2}}
    assert _OURS.parse(json.dumps(said), [load]).readings[load] == Reading(0.1, 0.1, 0.2)
    assert _OURS.parse(json.dumps({**said, "memory": {"resident": 5}}), [memory]).readings[memory].median == 5
    bench = json.dumps({"samples_ts": [30.0], "n_prompt": 64, "n_depth": 0})
    wrapped = bench + "\n" + json.dumps({"wall_s": [9.0, 1.0, 2.0], "peak_rss_bytes": 7})
    assert _THEIRS.parse(wrapped, [memory]).readings[memory].median == 7
    assert _THEIRS.parse(wrapped, [load]).readings[load] == Reading(1.5, 1.0, 2.0)  # the first was a warm-up


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
def test_peak_measures_the_command(tmp_path: Path) -> None:
    grow = "b = bytearray(100 << 20); b[::4096] = b'x' * len(b[::4096]); print('done')"
    peak = Path(bench_peers.__file__).with_name("peak.py")
    printed = run_measured([sys.executable, str(peak), "2", sys.executable, "-c", grow], timeout_s=60).stdout
    done, said = printed.splitlines()
    assert done == "done" and len(json.loads(said)["wall_s"]) == 2
    assert 100 << 20 < json.loads(said)["peak_rss_bytes"] < 200 << 20


def test_a_command_that_fails_says_its_last_line() -> None:
    assert run_measured([sys.executable, "-c", "print('out')"], timeout_s=60).stdout == "out\n"
    with pytest.raises(ResourceError, match="status 3: why"):
        run_measured([sys.executable, "-c", "import sys; print('a\\nwhy', file=sys.stderr); sys.exit(3)"], timeout_s=60)
    with pytest.raises(ResourceError, match="did not end"):
        run_measured([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.5)


def test_gguf_pairs_neighbours_where_llama_pairs_halves() -> None:
    pytest.importorskip("gguf")
    from bench.make_gguf import _interleaved

    rows = np.arange(8, dtype=np.float32)[:, None]
    assert _interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_and_subjects_are_checked() -> None:
    assert bench_peers.cell_of("decode-1024") == Cell("decode", 1024)
    assert bench_peers.cell_of("load") == Cell("load", 1)
    for wrong in ("decode", "prefill-x", "load-3", "speed-1", ""):
        with pytest.raises(UsageError, match="--rows"):
            bench_peers.cell_of(wrong)
    assert subject("llama-1b", "q8f16_1").bits == 8
    assert subject("llama-1b", "Q4_K_M").bits == 0
    with pytest.raises(UsageError, match="4 or 8"):
        subject("llama-1b", "q0f32")


def test_goals_stand_beside_what_was_reached() -> None:
    peers = {"mlcpipe": "mlcpipe", "slow": "llama.cpp", "fast": "llama.cpp"}
    traffic = Traffic(dict.fromkeys(peers, 10**9), dict.fromkeys(peers, 0.0), 32, 32 << 20)
    found = []
    for cell, ours, share in (
        (Cell("decode", 0), 30, 0.9),
        (Cell("decode", 4096), 30, 0.8),
        (Cell("prefill", 512), 40, None),
    ):
        runs = {"mlcpipe": [_run(0, ours, share=share)], "slow": [_run(0, 10)], "fast": [_run(0, 20)]}
        found.append(compare(("lfm2-1.2b", "q4f16_1", 4), cell, runs, peers, traffic, 0.1))
    goals = {**document([], {}), "goals": goals_document("hybrids")}
    text = markdown(merge(goals, document(found, {})))
    for line in (
        "| lfm2-1.2b | decode-0 | 90% (88%) | 1.50 (1.4) | yes |",
        "| lfm2-1.2b | decode-4096 | 80% (88%) | 1.50 (1.4) | no |",
        "| lfm2-1.2b | prefill-512 |  | 2.00 (2.5) | no |",
    ):
        assert line in text
    assert "Goals" not in markdown(document(found, {}))
    for rows in GOALS["hybrids"].values():
        assert [bench_peers.cell_of(row) for row in rows]
    assert GOALS["hybrids"].keys() <= set(SHAPES)


@pytest.mark.parametrize(
    ("threads", "busy", "processors", "share"),
    [(2, 0, 2, 1.0), (2, 1, 2, 2 / 3), (2, 2, 2, 0.5), (2, 2, 4, 1.0), (4, 0, 2, 1.0), (4, 4, 2, 0.5)],
)
def test_a_fair_share(threads: int, busy: int, processors: int, share: float) -> None:
    assert fair_share(threads, busy, processors) == pytest.approx(share)


def test_hogs_end_with_the_measurement() -> None:
    with hogs(2) as running:
        assert [process.poll() for process in running] == [None, None]
    assert all(process.poll() is not None for process in running)


def _said(kind: str, tokens: int) -> dict[str, Any]:
    return {
        "results": [{"kind": kind, "tokens": tokens, "speed": {"median": 30.0, "low": 29.0, "high": 31.0}, "share_of_read_bandwidth": 0.5}],
        "read_gb_s": [40.0, 42.0], "cpu": "a cpu", "threads": 2, "versions": {},
    }  # fmt: skip


def _printing(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


class _Ours(Mlcpipe):
    def command(self, cells: Sequence[Cell]) -> list[str]:
        return _printing(json.dumps(_said(cells[0].kind, cells[0].tokens)) if cells[0].tokens < 99 else "no JSON")


class _Theirs(LlamaBench):
    """20 tok/s with flash attention, 2 without."""

    def command(self, cells: Sequence[Cell]) -> list[str]:
        said = {"n_prompt": cells[0].tokens, "n_depth": 0, "samples_ts": [20.0 if self.flash_attention else 2.0]}
        return _printing(json.dumps({**said, "build_number": 1, "build_commit": "abc"}))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    runners = [_Ours(Path("b"), _EFFORT, 1)]
    theirs = [_Theirs(Path("l"), Path("m"), _EFFORT, 1, flash_attention=flash) for flash in (False, True)]
    manifest = cast("Manifest", SimpleNamespace(kv_bytes_per_token=1))
    what = Subject("llama-1b", "q4f16_1", 4)
    empty = document([], {})
    return bench_peers.measure_subject(what, [*runners, *theirs], manifest, options, bench_peers.Log(), empty)


@pytest.mark.full
def test_rounds_go_on_with_the_faster_variant_and_a_later_failure_loses_nothing(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    parser = argparse.ArgumentParser()
    options = bench_peers.options_of(parser, ["--rounds", "3", "--foreign", "1000"])
    options.rows, options.output = ["prefill-16", "decode-99"], output
    with pytest.raises(ResourceError, match="no JSON"):
        _measure(options)
    (kept,) = json.loads(output.read_text())["comparisons"]
    assert kept["cell"] == {"kind": "prefill", "tokens": 16}
    assert kept["ratios"] == {"llama.cpp": [1.5, 1.5, 1.5]}
    assert [(line["runtime"], len(line["runs"])) for line in kept["lines"]] == [
        ("mlcpipe", 3), ("llama.cpp fa0", 1), ("llama.cpp fa1", 3),
    ]  # fmt: skip
    assert "build 1 (abc)" in json.loads(output.read_text())["circumstances"]["llama.cpp"]


def test_cpu_time_that_a_command_reports_is_not_foreign() -> None:
    measured = Measured("", 10.0, foreign_cores=0.5, steal_cores=0.0, children_cpu_s=2.0)
    assert measured.counting(6.0).foreign_cores == pytest.approx(0.1)  # 4 of the 5 seconds were its own
    assert measured.counting(9.0).foreign_cores == 0.0
    assert measured.counting(1.0) == measured.counting(None) == measured


class _Page(WebRunner):
    """Ours decodes in 50 ms, of which 3 are the page's own; transformers.js ten times slower, fp32 still slower."""

    def command(self, cells: Sequence[Cell]) -> list[str]:
        job = json.loads(super().command(cells)[-1])
        slow = {"webllm": 1, "tvmjs": 1, "transformers": 10 if self.options.get("dtype") == "q4" else 40}[
            job["runtime"]
        ]
        samples = {
            "prefill": [500 / slow],
            "decode": [20 / slow],
            "own_ms": [3.0 if job["runtime"] == "webllm" else 2.5],
        }
        said = {
            "samples": samples if job["kind"] == "speed" else {"first_token": [slow, slow, slow + 1.0]},
            "adapter": {"vendor": "google", "architecture": "swiftshader", "description": "", "f16": False},
            "versions": {"a-package": "1.2.3"}, "browser": "156.0", "cpu_s": 0.0,
        }  # fmt: skip
        return _printing("a line of a browser\n" + json.dumps(said))


def test_browsers_take_turns_and_their_tables_join_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "wait_until_quiet", lambda *_: True)
    options = bench_web.options_of(["--rounds", "2", "--output", str(tmp_path / "r.json"), "--foreign", "1000"])
    folders = dict.fromkeys(("bundle", "onnx", "gguf"), Path("model"))
    all_of_them = runners_of(folders, Browser("chromium", "swiftshader", False), WebEffort(2, 3, 16, 60.0))
    pages = [_Page(**vars(runner)) for runner in all_of_them if runner.module != "wllama"]
    shown = markdown(bench_web.measure_parts(pages, options, document([], {})))
    assert (
        "- adapter: google/swiftshader, without shader-f16\n" in shown
        and "- transformers.js: a-package 1.2.3\n" in shown
    )
    assert "- outside waits for the GPU: 3.0 of 50.0 ms a token; tvmjs alone 2.5 ms\n" in shown
    assert "|  | mlcpipe | tvmjs alone | mlcpipe / it | transformers.js | mlcpipe / it |" in shown
    assert "| decode, depth 128, tok/s | 20.0 | 20.0 | 1.00 (1.00 - 1.00) | 2.0 (q4) | 10.00 (10.00 - 10.00) |" in shown
    assert "| load to first token of a prompt of 16, s | 1.00 |  |  | 10.00 (q4) | 10.00 (10.00 - 10.00) |" in shown
    runs = {
        line["runtime"]: len(line["runs"])
        for line in json.loads((tmp_path / "r.json").read_text())["comparisons"][0]["lines"]
    }
    assert runs == {"mlcpipe": 2, "tvmjs alone": 2, "transformers.js q4": 2, "transformers.js fp32": 1}
    with pytest.raises(ResourceError, match="no result"):
        all_of_them[0].parse("", [_DECODE])
    with pytest.raises(UsageError, match="wllama"):
        bench_web.options_of(["--runtimes", "another"])


def test_a_letter_is_a_token(tmp_path: Path) -> None:
    make_checkpoint("llama-25m", tmp_path / "m", tokenizer=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert len(tokenizer.encode("thequickbrown").ids) == 13 and tokenizer.get_vocab_size() == 8192


_PROGRAMS = (
    "bench_native_serving",
    "bench_peers",
    "bench_serving",
    "bench_web",
    "busy_core",
    "kernels",
    "make_checkpoint",
    "make_gguf",
)


@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.full
def test_programs_say_what_they_take(program: str) -> None:
    command = [sys.executable, "-m", f"bench.{program}", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
