"""Owns the choice of a rank's form of KV, and of the policy in core that decides for it."""

from __future__ import annotations

from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy
from sgl_batch.core.start_choices import PER_INTERVAL
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed
from sgl_batch.kv_offload.device_kv import DeviceKV
from sgl_batch.kv_offload.exclusive_kv import ExclusiveKV
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.kv_offload.kv_tiers import KVTiers
from sgl_batch.kv_offload.store_kv import StoreKV
from sgl_batch.kv_offload.streamed_kv import StreamedKV
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


def kv_form(
    scheduler: SGLangScheduler, counters: Counters, tiers: KVTiers | None, decode_kv: str
) -> tuple[KVForm, KVPolicy]:
    """Return the form and its policy. Called after the scheduler's pools are made.

    Args:
        scheduler: whose requests and pools the form uses.
        counters: where copies are counted.
        tiers: the rank's tiers; None without a host store.
        decode_kv: the mode that the start has chosen: resident, streamed, or either, by the interval.
    """
    if tiers is None:
        return DeviceKV(scheduler, counters), DeviceOnly()
    store = StoreKV(scheduler, counters, tiers)
    if tiers.stored.exclusive:
        return ExclusiveKV(store, counters), Exclusive(to_store=tiers.stages_prompts)
    if decode_kv == "streamed":
        return StreamedKV(scheduler, counters, store, streams=True), Streamed()
    if decode_kv == PER_INTERVAL:
        return StreamedKV(scheduler, counters, store, streams=False), Streamed(StreamingChoice())
    return store, Inclusive()
