"""Builds the graph of a layer's forward pass: attention by sub-batch, experts, and the copies that these wait for.

    weights of a layer ------------------------------> experts       (few rows: only once attention and router are done)
    KV of a sub-batch restored --> attention --> hidden states written --> experts --> attention of the next layer
                                       |
                                       +--> KV of the sub-batch taken to the store

Nodes of one stream run in order. A copy into a buffer waits until what read the buffer last has ended: KV has two
buffers, weights `weight_slots`. The graph is unrolled over layers until each one takes as long as the one before.

A GPU copies beside its kernels. On a CPU the threads that copy take cores from the ones that compute: a layer takes no
less than all of its work divided by the cores (`busy_s`), however well the copies overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.planner.critical_path import Node, busy_s, critical_path

ATTENTION, WRITE, EXPERTS, EXCHANGE = "attention", "hidden-state write", "experts", "exchange"
RESTORE, OFFLOAD, FETCH = "KV restore", "KV offload", "weight fetch"
COPIES = (RESTORE, OFFLOAD, FETCH)
COMPUTE, EXCHANGED, TO_DEVICE, TO_STORE, WEIGHTS = "compute", "exchange", "to the device", "to the store", "weights"
_KV_SLOTS = 2
_UNROLLED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a piece of work, and the bytes that it moves."""

    seconds: float = 0.0
    num_bytes: float = 0.0


NOTHING = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubBatch:
    """The work of a sub-batch in one layer. `write`: of its hidden states into the accumulation buffer.

    `experts` is its own call where it yields behind the experts; else the group has one.
    """

    attention: Work
    write: Work = NOTHING
    restore: Work = NOTHING
    offload: Work = NOTHING
    experts: Work = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of a group in one layer.

    Attributes:
        sub_batches: In the order in which attention takes them.
        experts: The group's one call, router included.
        exchange: With other ranks, around the call.
        fetch: Of the weights of the layer's experts.
        fetches_ahead: Whether it begins before attention; else when a first router has chosen.
        weight_slots: How many layers' experts the buffers hold.
        copy_cores: The share of the cores that a copy takes; 0 on a GPU.
    """

    sub_batches: Sequence[SubBatch]
    experts: Work = NOTHING
    exchange: Work = NOTHING
    fetch: Work = NOTHING
    fetches_ahead: bool = True
    weight_slots: int = 2
    copy_cores: float = 0.0

    @property
    def copies(self) -> bool:
        """Return whether anything runs beside the computation; an exchange of rows is waited for."""
        moved = [self.fetch, *(one for sub in self.sub_batches for one in (sub.restore, sub.offload))]
        return any(one is not NOTHING for one in moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """What a layer takes in the steady state, and the kind of work that most of its critical path is.

    `waits_s`: of the computation for copies; `hideable_s`: how much less it would wait with another group's work in
    between, until the copies themselves take longest.
    """

    seconds: float
    waits_s: float
    bottleneck: str
    hideable_s: float = 0.0


class _Builder:
    def __init__(self, work: LayerWork) -> None:
        self.work, self.nodes, self.layer = work, list[Node](), 0
        self._last: dict[str, int] = {}

    def add(self, kind: str, stream: str, work: Work, *after: int | None) -> int | None:
        """Add a node, behind the last one of its stream; nothing for work that is none. Returns its index."""
        if work is NOTHING:
            return None
        before = [index for index in (*after, self._last.get(stream)) if index is not None]
        cores = self.work.copy_cores if kind in COPIES else 1.0
        self.nodes.append(
            Node(
                kind=kind,
                seconds=work.seconds,
                after=tuple(set(before)),
                cores=cores,
                num_bytes=work.num_bytes,
                stream=stream,
                layer=self.layer,
            )
        )
        self._last[stream] = len(self.nodes) - 1
        return self._last[stream]


def build(work: LayerWork, num_layers: int) -> list[Node]:
    """Return the graph of `num_layers` layers of the same work, one behind the other."""
    graph = _Builder(work)
    attended: list[int | None] = []
    taken: list[int | None] = []
    experts_done: list[int | None] = []
    for layer in range(num_layers):
        graph.layer = layer
        read_before = experts_done[layer - work.weight_slots] if layer >= work.weight_slots else None
        fetched = graph.add(FETCH, WEIGHTS, work.fetch, read_before) if work.fetches_ahead else None
        group_done = experts_done[-1] if experts_done else None
        written: list[int | None] = []
        last: int | None = group_done
        for sub in work.sub_batches:
            free = attended[-_KV_SLOTS] if len(attended) >= _KV_SLOTS else None
            restored = graph.add(RESTORE, TO_DEVICE, sub.restore, free)
            # KV goes to the store from the buffer that the second last sub-batch has filled.
            emptied = taken[-_KV_SLOTS] if len(taken) >= _KV_SLOTS else None
            attention = graph.add(ATTENTION, COMPUTE, sub.attention, restored, group_done, emptied)
            attended.append(attention)
            taken.append(graph.add(OFFLOAD, TO_STORE, sub.offload, attention))
            written.append(graph.add(WRITE, COMPUTE, sub.write, attention))
            if fetched is None and (work.experts is NOTHING or sub is work.sub_batches[-1]):
                fetched = graph.add(FETCH, WEIGHTS, work.fetch, read_before, written[-1], attention)
            last = graph.add(EXPERTS, COMPUTE, sub.experts, fetched, attention)
        sent = graph.add(EXCHANGE, EXCHANGED, work.exchange, *written)
        computed = graph.add(EXPERTS, COMPUTE, work.experts, fetched, sent, *written, attended[-1])
        experts_done.append(computed if computed is not None else last)
    return graph.nodes


def layer_time(work: LayerWork) -> LayerTime:
    """Return what each further layer takes, once the pass is past its first ones."""
    return _steady_state(work) if work.copies else _sum(work)


def _sum(work: LayerWork) -> LayerTime:
    """Return the time of a layer without copies: a chain."""
    times = {
        ATTENTION: sum(sub.attention.seconds + sub.write.seconds for sub in work.sub_batches),
        EXPERTS: work.experts.seconds + sum(sub.experts.seconds for sub in work.sub_batches),
        EXCHANGE: work.exchange.seconds,
    }
    return LayerTime(seconds=sum(times.values()), waits_s=0.0, bottleneck=max(times, key=times.__getitem__))


def _steady_state(work: LayerWork) -> LayerTime:
    more = build(work, 2 * _UNROLLED)
    few = more[: len(more) // 2]  # each layer adds the same nodes behind those before it
    path = critical_path(more)
    chained = (path.seconds - critical_path(few).seconds) / _UNROLLED
    busy = (busy_s(more) - busy_s(few)) / _UNROLLED
    computing = sum(node.seconds for node in more if node.kind not in COPIES) / (2 * _UNROLLED)
    copying = _copying_s(work)
    seconds = max(chained, busy, copying)
    by_kind: dict[str, float] = {}
    for index in path.nodes:
        by_kind[more[index].kind] = by_kind.get(more[index].kind, 0.0) + more[index].seconds
    return LayerTime(
        seconds=seconds,
        waits_s=max(seconds - computing, 0.0),
        bottleneck=max(by_kind, key=by_kind.__getitem__, default=ATTENTION),
        # On a CPU copies take cores from computation: nothing hides.
        hideable_s=0.0 if work.copy_cores else max(seconds - max(computing, copying), 0.0),
    )


def _copying_s(work: LayerWork) -> float:
    """Return the seconds that a layer's copies take by themselves. One link brings KV and weights to a GPU."""
    restores = sum(sub.restore.seconds for sub in work.sub_batches)
    offloads = sum(sub.offload.seconds for sub in work.sub_batches)
    coming = (restores, work.fetch.seconds)
    return max(max(coming) if work.copy_cores else sum(coming), offloads)
