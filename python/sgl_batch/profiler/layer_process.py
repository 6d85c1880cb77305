"""The process that profiles layers: loads a cut model with made-up weights, runs the grid, prints a line per sample.

Its argument is a JSON object: `server_args` for SGLang's arguments, `config` for ours, `layers` by kind, `most_rows`,
`most_tokens`, `pool_tokens`, `context`, `within_s` (the time for all samples), `directory` for its rendezvous.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sgl_batch.config import from_mapping
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.engine.engine import make_server_args
from sgl_batch.errors import ConfigError
from sgl_batch.managers.tp_worker import BatchTpWorker
from sgl_batch.mem_cache.device_page_pool import lazy_zeros
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.planner.samples import PassSample
from sgl_batch.profiler.grid import sizes
from sgl_batch.profiler.trial_passes import TrialPasses
from sgl_batch.sglang_adapter.trial_batches import begin_lone_rank

_MOST_ROWS_ALONE = 64
_COPY_BYTES = 64 << 20
_COPIES = 4
_NEW_BYTES = 1 << 30


def load(spec: Mapping[str, Any]) -> BatchModelRunner:
    """Load the cut model in this process. Raises ConfigError for one that a layer runner cannot compute."""
    config, counters = from_mapping(spec["config"]), Counters()
    server_args = make_server_args(dict(spec["server_args"]), config)
    rank = begin_lone_rank(server_args)
    operators = CpuOperators(counters, config.forward)
    operators.register()
    context = RunContext(
        in_force=PlanInForce(config),
        counters=counters,
        cpu_operators=operators,
        rendezvous=Rendezvous(Path(spec["directory"])),
    )
    worker = BatchTpWorker(context=context, server_args=server_args, gpu_id=0, ps=rank, nccl_port=0)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    runner: BatchModelRunner = worker.model_runner
    if runner.layer_runner is None:
        raise ConfigError("the model has no family adapter, and only layers of a model with one are profiled")
    return runner


def samples(spec: Mapping[str, Any]) -> Iterator[PassSample]:
    """Measure the grid round by round until the time is up, and prefill and decode of each kind of layer once at least.

    Small decode groups run with one layer as well as with all of a kind: what a pass takes once is the same for all
    sizes.
    """
    runner = load(spec)
    ends = time.perf_counter() + spec["within_s"]
    trial = TrialPasses(runner)
    grid = sizes(
        most_rows=spec["most_rows"],
        most_tokens=spec["most_tokens"],
        pool_tokens=min(spec["pool_tokens"], runner.max_total_num_tokens) - spec["most_rows"] * 2,
        context=spec["context"],
    )
    missing = {(kind, size.decode) for kind in spec["layers"] for size in grid}
    for size in itertools.cycle(grid):
        for kind, layers in spec["layers"].items():
            alone = size.decode and size.rows <= _MOST_ROWS_ALONE and len(layers) > 1
            for some in (layers[:1], layers) if alone else (layers,):
                is_late = time.perf_counter() > ends
                if is_late and not missing:
                    return
                if is_late and (kind, size.decode) not in missing:
                    continue
                missing.discard((kind, size.decode))
                yield trial.measure(size, kind, some)


def copy_rate() -> float:
    """Return bytes a second of copies between two places of this machine's memory: on a CPU both tiers lie there."""
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target.copy_(source)
    begun = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    return _COPIES * _COPY_BYTES / (time.perf_counter() - begun)


def new_memory_rate() -> float:
    """Return bytes a second of writing to memory that the kernel has to provide first, by all threads, as for KV."""
    pages = lazy_zeros((_NEW_BYTES,), torch.uint8)
    begun = time.perf_counter()
    pages.fill_(1)
    return _NEW_BYTES / (time.perf_counter() - begun)


def main() -> None:
    """Print the samples on what was standard output at the start; libraries print to standard error."""
    spec = json.loads(sys.argv[1])
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            for sample in samples(spec):
                answers.write(json.dumps(asdict(sample)) + "\n")
            answers.write(json.dumps({"rates": {"copy": copy_rate(), "new memory": new_memory_rate()}}) + "\n")
        except ConfigError as error:
            answers.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # not by Python's own end, which lets millions of objects go one by one
