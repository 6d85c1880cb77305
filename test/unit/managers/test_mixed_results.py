"""The order in which the results of a pass are taken, where prompts were computed beside decode rows."""

from __future__ import annotations

from types import SimpleNamespace

from sgl_batch.managers.scheduler import BatchScheduler


def test_prompts_take_their_shared_pages_before_decode_rows_that_end_let_go_of_them():
    done: list[str] = []
    decoding = SimpleNamespace(name="decode rows", forward_mode=SimpleNamespace(is_extend=lambda: False))
    prompts = SimpleNamespace(name="prompts")
    scheduler = SimpleNamespace(
        _results_beside=(prompts, "of the prompts"),
        executor=SimpleNamespace(before_prefill_results=lambda batch: done.append(f"{batch.name} take pages")),
        _results_can_wait=lambda batch: False,
        _process_results=lambda batch, result: done.append(f"{batch.name}: results {result}"),
    )

    BatchScheduler.process_batch_result(scheduler, decoding, "of the rows")

    assert done == ["prompts take pages", "decode rows: results of the rows", "prompts: results of the prompts"]
    assert scheduler._results_beside is None
