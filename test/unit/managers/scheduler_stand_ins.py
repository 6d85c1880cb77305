"""Stand-ins for the parts of SGLang's scheduler and requests that the sequence table and the executor read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def scheduler_stand_in(**parts: Any) -> SimpleNamespace:
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(size=64_000),
        page_size=64,
        req_to_token_pool=SimpleNamespace(size=512, available_size=lambda: 256),
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[]),
        **parts,
    )


def request(number: int, *, max_new_tokens: int = 8, **parts: Any) -> SimpleNamespace:
    """A request of 100 prompt tokens that has generated one."""
    settings = {
        "rid": f"r{number}",
        "extra_key": None,
        "to_finish": None,
        "origin_input_ids": [1] * 100,
        "output_ids": [1],
        "kv_committed_len": 100,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "sampling_params": SimpleNamespace(max_new_tokens=max_new_tokens, custom_params=None, stop_regex_strs=None),
    }
    return SimpleNamespace(**{**settings, **parts})
