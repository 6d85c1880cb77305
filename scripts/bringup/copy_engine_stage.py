"""Owns the stage that drives the GPU's copy engine on its own streams while the GPU computes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES, BLOCKS, ROUNDS = 32, 64, 300
LAYERS = range(3)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Check that pages that are overwritten while they are stored come back as they were when they were stored."""
    import torch

    from sgl_batch.kv_offload.cuda_copy_engine import CudaCopyEngines
    from sgl_batch.kv_offload.host_kv_store import HostKVStore
    from sgl_batch.kv_offload.store_geometry import StoreGeometry

    device, draw = spec["device"], random.Random(0)
    parts = [tuple(torch.zeros(PAGES, 4096, dtype=torch.int64, device=device) for _ in range(2)) for _ in LAYERS]
    pool = SimpleNamespace(layer_num=len(LAYERS), page_parts=parts.__getitem__)
    geometry = StoreGeometry.of_pool(pool)
    with HostKVStore.create(geometry, num_bytes=BLOCKS * geometry.block_bytes) as store:
        engines = CudaCopyEngines(store) if device == "cuda" else _engines_of_a_cpu(store)
        engine = engines.engine_for(pool)
        kept: list[tuple[Any, Any, int]] = []
        for value in range(1, ROUNDS + 1):
            page = draw.randrange(PAGES)
            for part in (part for layer in parts for part in layer):
                part[page] = value
            blocks = store.prepare_store(1)
            assert blocks is not None, "blocks are given back"
            ticket = engine.store_pages(LAYERS, [page], blocks)
            ticket.device_waits()  # later writes wait for the copy's reads
            kept.append((ticket, blocks, value))
            if len(kept) > BLOCKS // 2:
                _bring_back(engine, store, parts, *kept.pop(draw.randrange(len(kept))), draw.randrange(PAGES))
        while kept:
            _bring_back(engine, store, parts, *kept.pop(), draw.randrange(PAGES))
        counters = engine.counters()
        engine.close()
        engines.close()
    return {"remark": f"{counters.stored_pages} pages stored, {counters.loaded_pages} loaded, all as they were"}


def _bring_back(engine: Any, store: Any, parts: Any, stored: Any, blocks: Any, value: int, page: int) -> None:
    """Check that a page is restored to another page, and that the host does not wait for the copy."""
    stored.wait()
    store.complete_store(blocks)
    ticket = engine.load_pages(LAYERS, blocks, [page])
    ticket.device_waits()
    values = {int(number) for layer in parts for part in layer for number in (part[page].min(), part[page].max())}
    assert values == {value}, f"page {page} has {values} instead of {value}"
    ticket.wait()
    store.free(blocks)


def _engines_of_a_cpu(store: Any) -> Any:
    """Run the unit tests' checks, whose copies are made as late as a wait allows."""
    sys.path.append(str(ROOT / "test" / "unit" / "kv_offload"))
    from late_streams import LateEngines

    return LateEngines(store, late=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
