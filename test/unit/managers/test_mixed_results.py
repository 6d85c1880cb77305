"""The order in which the results of a pass with prompts and decode rows are processed."""

from __future__ import annotations

from types import SimpleNamespace

from sgl_batch.managers.scheduler import BatchScheduler


def test_prompts_take_shared_pages_before_finished_decode_rows_free_them():
    done: list[str] = []
    decoding = SimpleNamespace(name="decode rows", forward_mode=SimpleNamespace(is_extend=lambda: False))
    prompts = SimpleNamespace(name="prompts")
    scheduler = SimpleNamespace(
        _mixed_prefill_results=(prompts, "of the prompts"),
        executor=SimpleNamespace(
            results=SimpleNamespace(before_prefill=lambda batch: done.append(f"{batch.name} take pages"))
        ),
        _results_can_wait=lambda batch: False,
        _speculation=SimpleNamespace(further_steps=lambda batch: []),
        _process_results=lambda batch, result: done.append(f"{batch.name}: results {result}"),
    )

    BatchScheduler.process_batch_result(scheduler, decoding, "of the rows")

    assert done == ["prompts take pages", "decode rows: results of the rows", "prompts: results of the prompts"]
    assert scheduler._mixed_prefill_results is None
