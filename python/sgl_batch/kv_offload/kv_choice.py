"""Owns which form of KV a rank has, as its start has settled it, and the policy in core that decides for that form."""

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
    """The form and its policy; `tiers` where there is a host store. Made after the scheduler's pools.

    `decode_kv`: as the start has settled it: resident, streamed, or `auto`, either by the page.
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
