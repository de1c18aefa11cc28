"""Prometheus metrics of a server, under vLLM's names so that its dashboards carry over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mlcpipe.runtime.serving.interface import EngineStats
from mlcpipe.server.errors import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_UNKNOWN = 200  # names of ignored fields that are counted separately
_MAX_NAME = 64  # characters per name
_MOST_COUNTED = 20  # per body
_LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(float(1 << power) for power in range(18))


class _EngineCollector(Collector):
    """The engine's counters, read on request."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests that are computed.", stats.running),
            ("num_requests_waiting", "Requests that wait.", stats.waiting),
            ("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", stats.kv_usage),
            ("swap_bytes", "Keys and values of preempted requests on the host.", stats.swap_bytes),
        ):
            yield GaugeMetricFamily(f"mlcpipe_{name}", text, value=value)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached),
            ("prefix_cache_lost", "Prompt tokens found there whose recurrent state or window was gone.", stats.lost),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt),
            ("generation_tokens", "Tokens of answers.", stats.generated),
            ("num_preemptions", "Preempted requests.", stats.preemptions),
            ("swapped_out_tokens", "Tokens whose keys and values were copied to the host.", stats.swapped_out),
            ("swapped_in_tokens", "Of these, tokens copied back.", stats.swapped_in),
            ("spec_decode_num_drafts", "Drafts that were checked.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", stats.drafted),
            ("spec_decode_num_accepted_tokens", "Of these, accepted tokens.", stats.accepted),
        ):
            yield CounterMetricFamily(f"mlcpipe_{name}", text, value=value)
        if (seen := stats.pictures) is not None:
            for name, text, value in (
                ("pictures", "Pictures of requests.", seen.given),
                ("picture_tiles", "Parts of pictures that the tower computed.", seen.tiles),
                ("picture_rows", "Rows that they have, of which each takes the place of a token.", seen.rows),
                ("picture_seconds", "Seconds of computing them.", seen.seconds),
                ("mm_cache_queries", "Parts of pictures that were looked up among those computed.", seen.queries),
                ("mm_cache_hits", "Of these, parts that were found.", seen.hits),
            ):
                yield CounterMetricFamily(f"mlcpipe_{name}", text, value=value)
        misses = CounterMetricFamily(
            "mlcpipe_prefix_cache_misses", "Requests that could not start later, by the reason.", labels=["reason"]
        )
        for reason, count in sorted(stats.misses.items()):
            misses.add_metric([reason], count)
        yield misses
        ended = CounterMetricFamily("mlcpipe_request_success", "Requests that ended.", labels=["finished_reason"])
        for reason, count in sorted(stats.finished.items()):
            ended.add_metric([reason], count)
        yield ended
        steps = CounterMetricFamily("mlcpipe_step_seconds", "Seconds of computing.", labels=["part"])
        for part, seconds in sorted(stats.step_s.items()):
            steps.add_metric([part], seconds)
        yield steps


class _Read(Collector):
    """Counters of other components."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """Counters and histograms of requests, in addition to the engine's, if there is one."""

    def __init__(self, stats: Callable[[], EngineStats] | None) -> None:
        self._registry = CollectorRegistry()
        if stats is not None:
            self._registry.register(_EngineCollector(stats))
        self.first = self._histogram("time_to_first_token_seconds", "From a request to its first token.", _LATENCY_S)
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens of an answer.", _BETWEEN_S)
        self.whole = self._histogram("e2e_request_latency_seconds", "From a request to its end.", _WHOLE_S)
        self.queued = self._histogram("request_queue_time_seconds", "From a request to its first step.", _LATENCY_S)
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._rejected = Counter(
            "mlcpipe_rejected_requests", "Requests that were refused.", ["reason"], registry=self._registry
        )
        self._unknown = Counter(
            "mlcpipe_unknown_fields", "Fields that were ignored.", ["path", "field"], registry=self._registry
        )
        self._unknown_names: set[str] = set()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def count_unknown(self, path: str, fields: Iterable[str]) -> None:
        """Count ignored fields of a body, up to a limit."""
        for field in (one[:_MAX_NAME] for one in islice(fields, _MOST_COUNTED)):
            named = field in self._unknown_names or (len(self._unknown_names) < _MOST_UNKNOWN and field.isidentifier())
            if named:
                self._unknown_names.add(field)
            self._unknown.labels(path, field if named else "other").inc()

    def count_rejected(self, error: ApiError) -> None:
        """Count a refused request; 499 means that its client left."""
        if error.status != 499:
            self._rejected.labels(str(error.code or error.status)).inc()

    def timer(self, prompt_tokens: int) -> RequestTimer:
        """Times for a request that begins now."""
        return RequestTimer(self, prompt_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlcpipe_{name}", text, buckets=buckets, registry=self._registry)


def merged(texts: Mapping[str, bytes], label: str = "replica") -> bytes:
    """Metrics of several servers or models in one text; each sample has the name of its own as `label`, "" none."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            same = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                same.add_sample(sample.name, {**sample.labels, **({label: name} if name else {})}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Read(families.values()))
    return generate_latest(registry)


class RequestTimer:
    """The times of one request: `prompt_s` from its first step to its first token, `answer_s` from there."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._prompt_tokens = metrics, prompt_tokens
        self._began = time.monotonic()
        self._last: float | None = None
        self.prompt_s = self.answer_s = 0.0

    def token(self, queued_s: float) -> None:
        """Record a token."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.first.observe(now - self._began)
            self._metrics.queued.observe(queued_s)
            self.prompt_s = max(0.0, now - self._began - queued_s)
        else:
            self._metrics.between.observe(now - self._last)
            self.answer_s += now - self._last
        self._last = now

    def end(self, tokens: int) -> None:
        """Record the end."""
        self._metrics.whole.observe(time.monotonic() - self._began)
        self._metrics.prompt.observe(self._prompt_tokens)
        self._metrics.answer.observe(tokens)
