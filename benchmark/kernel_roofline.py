#!/usr/bin/env python
"""Compares the roofline that the simulator uses on clusters with tables of measured kernels, module by module.

It needs the package aiconfigurator-core, whose tables it reads, and pyarrow. Entries that are not believed are left out
(simulator/cluster/kernel_tables.py).
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

from comparison.terminal import exit_code

from sgl_batch.errors import ConfigError
from sgl_batch.planner.layouts import Layout
from sgl_batch.simulator.cluster import costs as parts
from sgl_batch.simulator.cluster.costs import ClusterCosts
from sgl_batch.simulator.cluster.engines import engine_named
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.measured import measured_modules
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.cluster.regime import Regime
from sgl_batch.simulator.work import PassWork, pairs_of

PAIRS = (
    ("deepseek-r1", "h200x16", "batchgen"),
    ("deepseek-r1", "h200x16", "sglang"),
    ("kimi-k2", "b200x16", "batchgen"),
    ("qwen3-235b-a22b", "h200x8", "sglang"),
    ("qwen3-30b-a3b", "h100x1", "vllm"),
    ("qwen3-30b-a3b", "a100x1", "sglang"),
    ("mixtral-8x7b", "h100x1", "sglang"),
    ("mixtral-8x7b", "h100x1", "vllm"),
    ("mixtral-8x7b", "l40sx4", "vllm"),
)
# Sequences of a rank with so many tokens of KV each, and prompts of so many tokens.
DECODE = ((8, 2000), (32, 4000), (128, 2000), (256, 1000))
PROMPTS = ((8, 512), (4, 2048), (2, 8192), (16, 2048))


def works(ranks: int) -> list[tuple[str, PassWork]]:
    """The passes that are compared, by phase."""
    decode = [PassWork(rows=rows, kv_tokens=rows * context, all_rows=rows * ranks) for rows, context in DECODE]
    prompts = [
        PassWork(
            prompts=count,
            prompt_tokens=count * length,
            prompt_pairs=count * pairs_of(length),
            all_rows=count * length * ranks,
        )
        for count, length in PROMPTS
    ]
    return [*(("decode", work) for work in decode), *(("prefill", work) for work in prompts)]


def ratios(model_name: str, cluster_name: str, engine_name: str) -> dict[tuple[str, str], list[float]]:
    """Seconds by the roofline divided by those of measured kernels, by module and phase."""
    model, cluster, engine = model_named(model_name), cluster_named(cluster_name), engine_named(engine_name)
    layout = Layout(ranks=cluster.gpus)
    measured = measured_modules(model, cluster.sheet, engine, ranks=layout.ranks)
    if measured is None:
        raise ConfigError("there are no tables of kernels here: install aiconfigurator-core and pyarrow")
    plain, by_tables = (ClusterCosts(model, cluster, engine, layout, Regime(), one) for one in (None, measured))
    found = defaultdict[tuple[str, str], list[float]](list)
    for phase, work in works(layout.ranks):
        before, after = plain.of_exactly(work).parts, by_tables.of_exactly(work).parts
        for name in (parts.MATRICES, parts.ATTENTION, parts.EXPERTS):
            more = before.get(parts.TILES, 0.0) if name == parts.EXPERTS else 0.0
            if before[name] != after[name]:
                found[name, phase].append((before[name] + more) / after[name])
    print(
        f"{model_name} on {cluster_name}, {engine_name}: {measured.tables.taken} entries taken, "
        f"{measured.tables.refused} refused"
    )
    return found


def main() -> int:
    together = defaultdict[tuple[str, str], list[float]](list)
    for pair in PAIRS:
        for key, values in ratios(*pair).items():
            together[key] += values
    for (name, phase), values in sorted(together.items()):
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{name}, {phase}: {middle:.2f} ({least:.2f}-{most:.2f}) of {len(values)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("kernel_roofline.py", main))
