"""SGLang's Triton attention, made so that the plans of several sub-batches hold side by side. Not yet run on a GPU.

It runs on a CPU under Triton's interpreter, which is how this is tested.
"""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter.fixed_plans import FixedPlans
from sgl_batch.sglang_adapter.layers import register_attention_backend
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION


def register_triton_attention() -> None:
    """In this process, let SGLang's name for its Triton attention stand for ours."""
    register_attention_backend(TRITON_ATTENTION)(_create)


def _create(runner: Any) -> Any:
    # SGLang imports it when it is wanted: it needs Triton.
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class TritonAttention(TritonAttnBackend):  # type: ignore[misc]
        """Each plan has memory of its own, and pages where the pool's layers are led to."""

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            plan = self.forward_metadata
            # SGLang's point into buffers that its next plan overwrites.
            plan.kv_indptr = plan.kv_indptr.clone()
            if plan.qo_indptr is not None:
                plan.qo_indptr = plan.qo_indptr.clone()
            first_page = getattr(self.token_to_kv_pool, "first_page", 0)
            if first_page:
                plan.kv_indices = plan.kv_indices - first_page * self.page_size

        def fixed_plans(self, num_rows: int, num_slots: int) -> FixedPlans | None:
            """Room for the plans of decode groups of `num_rows` sequences; None where plans have more to them."""
            translates = self._translate_kv_loc is not None or self.use_sliding_window_kv_pool
            if translates or self.sliding_window_size is not None or self.dcp_size > 1:
                return None
            return FixedPlans(num_rows, num_slots, self.kv_indptr.device)

    return TritonAttention(runner)
