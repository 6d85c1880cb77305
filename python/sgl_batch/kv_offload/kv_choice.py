"""Owns the choice of a rank's form of KV, and of the policy in core that decides for it."""

from __future__ import annotations

import torch

from sgl_batch.config import MemoryConfig
from sgl_batch.core.admission_policy import AdmissionPolicy
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy, Overflowing
from sgl_batch.core.start_choices import PER_INTERVAL
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed
from sgl_batch.kv_offload.device_kv import DeviceKV
from sgl_batch.kv_offload.exclusive_kv import ExclusiveKV
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.kv_offload.kv_tiers import KVTiers, copy_engines
from sgl_batch.kv_offload.overflow_kv import OverflowKV
from sgl_batch.kv_offload.overflow_store import OverflowFile, StoreOverflow
from sgl_batch.kv_offload.store_kv import StoreKV
from sgl_batch.kv_offload.streamed_kv import StreamedKV
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


def kv_form(
    scheduler: SGLangScheduler,
    counters: Counters,
    tiers: KVTiers | None,
    decode_kv: str,
    admission: AdmissionPolicy,
    memory: MemoryConfig,
    num_ranks: int = 1,
) -> tuple[KVForm, KVPolicy]:
    """Return the form and its policy. Called after the scheduler's pools are made.

    Args:
        scheduler: whose requests and pools the form uses.
        counters: where copies are counted.
        tiers: the rank's tiers; None without a host store.
        decode_kv: the mode that the start has chosen: resident, streamed, or either, by the interval.
        admission: how much of its need a sequence reserves when it is admitted.
        memory: where an overflow is to lie.
        num_ranks: how many ranks may each have an overflow there.
    """
    if tiers is None:
        return _on_device(scheduler, counters, admission, memory, num_ranks)
    store = StoreKV(scheduler, counters, tiers, admission)
    if tiers.stored.exclusive:
        if admission.grows:
            on_device = DeviceKV(scheduler, counters, admission)
            return OverflowKV(scheduler, counters, on_device, StoreOverflow(tiers)), Overflowing()
        return ExclusiveKV(store, counters), Exclusive(to_store=tiers.stages_prompts)
    if decode_kv == "streamed":
        return StreamedKV(scheduler, counters, store, streams=True), Streamed()
    if decode_kv == PER_INTERVAL:
        return StreamedKV(scheduler, counters, store, streams=False), Streamed(StreamingChoice())
    return store, Inclusive()


def _on_device(
    scheduler: SGLangScheduler, counters: Counters, admission: AdmissionPolicy, memory: MemoryConfig, num_ranks: int
) -> tuple[KVForm, KVPolicy]:
    """Return the form without a store; where reservations grow, with an overflow that is made on demand."""
    on_device = DeviceKV(scheduler, counters, admission)
    if not admission.grows:
        return on_device, DeviceOnly()
    overflow = OverflowFile(
        scheduler.token_to_kv_pool_allocator.get_kvcache(),
        memory,
        counters,
        lambda store: copy_engines(store, scheduler.device, memory),
        page_size=scheduler.page_size,
        device_pages=on_device.device.total_pages,
        num_ranks=num_ranks,
        in_memory=torch.device(scheduler.device).type != "cpu",
    )
    return OverflowKV(scheduler, counters, on_device, overflow), Overflowing()
