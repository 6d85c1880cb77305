"""Owns refusing budgets of memory that cannot be kept, before anything starts. What fits a device is found there."""

from __future__ import annotations

import os

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.config import MemoryConfig
from sgl_batch.errors import ConfigError


def check_budgets(memory: MemoryConfig, *, on_cpu: bool, num_ranks: int) -> None:
    """Budgets hold what is asked for, and the machine the budgets. Raises ConfigError."""
    store = memory.store_in_memory_bytes
    if memory.host_memory and store > memory.host_memory:
        raise ConfigError(
            f"kv_store_bytes is {format_bytes(store)}, more than host_memory ({format_bytes(memory.host_memory)}) "
            "allows; lower --kv-store-bytes, raise --host-memory, or name a directory for the store (--kv-store-dir)"
        )
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_cpu and memory.device_memory and num_ranks * memory.device_memory + store > machine:
        too = f" and a host KV store in memory ({format_bytes(store)})" if store else ""
        raise ConfigError(
            f"device_memory ({format_bytes(memory.device_memory)} for each of {num_ranks} rank(s)){too} "
            f"{'are' if store else 'is'} more than the machine has, {format_bytes(machine)}; "
            f"lower --device-memory{' or --kv-store-bytes' if store else ''}"
        )
