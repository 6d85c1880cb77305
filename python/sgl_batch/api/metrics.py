"""Owns /metrics: the server's metrics, and after them the engine's own where it has any.

No metric has a job as a label: the number of jobs has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_batch.api.engine_keeper import EngineKeeper, InstanceRow
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.core.answers import EngineStats
from sgl_batch.jobs.batch_service.objects import ServiceSnapshot
from sgl_batch.jobs.cost import EngineTime, cost_of

_PREFIX = "sgl_batch:"
_ENGINE_WITHIN_S = 2.0
_PARTS_TEXT = "Where the engine's time went; idle is the time without work"
_ENGINE_COUNTERS = (
    "expert_calls",
    "expert_rows",
    "prompt_tokens",
    "output_tokens",
    "tokens_resumed",
    "decode_groups",
    "speculative_passes",
    "drafts",
    "drafts_accepted",
)
# Counter of the service -> name and help of the metric.
_COUNTERS = {
    "lines_completed": ("lines_completed", "Request lines of jobs that have an answer"),
    "lines_failed": ("lines_failed", "Request lines of jobs that have an error"),
    "lines_rerun": ("lines_rerun", "Request lines that ran again because the engine died"),
    "lines_resumed": (
        "lines_resumed",
        "Request lines that resumed from tokens that a dead engine had generated",
    ),
    "tokens_resumed": (
        "tokens_resumed",
        "Tokens that a dead engine had generated, of request lines that resumed from them",
    ),
    "tokens_in": ("prompt_tokens", "Prompt tokens of finished request lines"),
    "tokens_out": ("generation_tokens", "Generated tokens of finished request lines"),
    "commits": ("commits", "Group commits of finished lines"),
    "commit_s": ("commit_seconds", "Time in group commits"),
    "committed_bytes": ("committed_bytes", "Bytes of finished lines that were committed"),
    "engine_deaths": ("engine_deaths", "Engines that died while lines were in flight"),
    "storage_failures": ("storage_failures", "Writes to the jobs directory that failed"),
    "jobs_created": ("jobs_created", "Jobs that were created"),
    "jobs_ended": ("jobs_ended", "Jobs that have ended"),
    "engine_s": ("jobs_engine_seconds", "Time in which the engine had request lines of jobs"),
}


class _Ours(Collector):
    def __init__(self, snapshot: Callable[[], ServiceSnapshot], keeper: EngineKeeper) -> None:
        self._snapshot, self._keeper = snapshot, keeper

    def collect(self) -> Iterable[Metric]:
        yield from _service_metrics(self._snapshot())
        state = self._keeper.state
        yield _gauge("engine_ready", "Whether the engine answers", int(state.phase == "ready"))
        yield _gauge(
            "engine_stalled", "Whether the engine has work and makes no progress", int(state.phase == "stalled")
        )
        yield _counter("engine_restarts", "Starts of the engine after its first", state.restarts)
        stats = self._keeper.view.stats
        if stats is not None:
            yield from _engine_metrics(stats)
        if self._keeper.instances is not None:
            yield from instance_metrics(self._keeper.instances.rows())


def _service_metrics(snapshot: ServiceSnapshot) -> Iterable[Metric]:
    jobs = GaugeMetricFamily(_PREFIX + "num_jobs", "Jobs by status", labels=["status"])
    for status, number in snapshot.jobs_by_status.items():
        jobs.add_metric([status], number)
    yield jobs
    yield _gauge("num_lines_in_flight", "Request lines of jobs that the engine has", snapshot.in_flight)
    yield _gauge("in_flight_bytes", "Bytes of the request lines that the engine has", snapshot.in_flight_bytes)
    yield _gauge(
        "recorded_tokens", "Tokens in the partial outputs of unfinished request lines", snapshot.partial_output_tokens
    )
    yield _gauge("storage_ok", "Whether the jobs directory can be written", int(snapshot.storage.ok))
    for name, (ours, text) in _COUNTERS.items():
        yield _counter(ours, text, snapshot.counters.get(name, 0))
    if snapshot.price_per_hour is not None:
        time = EngineTime(seconds=snapshot.counters.get("engine_s", 0.0))
        cost = cost_of(time, snapshot.price_per_hour).amount
        yield _counter("jobs_cost", "What that time costs, in the currency of --price-per-hour", cost)


def _engine_metrics(stats: EngineStats) -> Iterable[Metric]:
    sequences = GaugeMetricFamily(_PREFIX + "num_sequences", "Sequences of the engine by state", labels=["state"])
    for state, number in stats.sequences.items():
        sequences.add_metric([state.lower()], number)
    yield sequences
    parts = CounterMetricFamily(_PREFIX + "part_seconds", _PARTS_TEXT, labels=["part"])
    for part, seconds in stats.part_s.items():
        parts.add_metric([part], seconds)
    yield parts
    for name in _ENGINE_COUNTERS:
        yield _counter(f"engine_{name}", f"The engine's counter {name}, since it started", stats.counters.get(name, 0))


def instance_metrics(rows: Iterable[InstanceRow]) -> Iterable[Metric]:
    """Return the metrics of instances, each with its name and node as labels."""
    labels = ["instance", "node"]
    ready = GaugeMetricFamily(_PREFIX + "instance_ready", "Whether an instance takes request lines", labels=labels)
    lines = GaugeMetricFamily(_PREFIX + "instance_lines_in_flight", "Request lines that an instance has", labels=labels)
    rate = GaugeMetricFamily(
        _PREFIX + "instance_lines_per_second", "Request lines that an instance answers in a second", labels=labels
    )
    answered = CounterMetricFamily(
        _PREFIX + "instance_lines_answered",
        "Request lines that an instance has answered since its start",
        labels=labels,
    )
    for row in rows:
        names = [row.name, row.node]
        ready.add_metric(names, int(row.phase == "ready"))
        lines.add_metric(names, row.in_flight)
        rate.add_metric(names, row.lines_per_s)
        answered.add_metric(names, row.answered)
    yield from (ready, lines, rate, answered)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def own_metrics(snapshot: Callable[[], ServiceSnapshot], keeper: EngineKeeper) -> CollectorRegistry:
    """Return a registry of the server's metrics, read when it is asked."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ours(snapshot, keeper))
    return registry


def metrics_router(snapshot: Callable[[], ServiceSnapshot], keeper: EngineKeeper, engine: PassThrough) -> APIRouter:
    """Return the route of /metrics."""
    registry = own_metrics(snapshot, keeper)
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        own = generate_latest(registry)
        # Counters of one of several engines, now of this one and now of that, would say nothing.
        engines = await engine.fetch("/metrics", _ENGINE_WITHIN_S) if keeper.instances is None else None
        return Response(own + (engines or b""), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
