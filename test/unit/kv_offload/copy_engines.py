"""The copy engines with which staging is tested: a CPU's threads, and a GPU's streams at their latest and soonest."""

from __future__ import annotations

from collections.abc import Callable

from late_streams import LateEngines

from sgl_batch.kv_offload.copy_engine import CopyEngines
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngines

ENGINES: dict[str, Callable[[HostKVStore], CopyEngines]] = {
    "one thread": lambda store: NativeCopyEngines(store, num_workers=1),
    "three threads": lambda store: NativeCopyEngines(store, num_workers=3),
    "streams that copy late": lambda store: LateEngines(store, late=True),
    "streams that copy at once": lambda store: LateEngines(store, late=False),
}


def keeps_checksums(kind: str) -> bool:
    """Return whether the store has checksums. A GPU's streams support none."""
    return kind == "three threads"
