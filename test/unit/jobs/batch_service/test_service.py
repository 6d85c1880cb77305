"""The service from upload to output, with engines that answer by script."""

from __future__ import annotations

import asyncio

from running_service import create, lines, records, service_in, until
from scripted_engines import answer

from sgl_batch.jobs.seeds import line_seed


def test_a_job_ends_with_one_record_for_each_line_in_input_order(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            batch = await create(service, lines(3000))
            done = await until(service, batch.id)
            assert done.status == "completed"
            assert done.request_counts == {"total": 3000, "completed": 3000, "failed": 0}
            assert done.error_file_id is None
            found = await records(service, done.output_file_id)
            assert [one["custom_id"] for one in found] == [f"r{index}" for index in range(3000)]
            seed = done.x_sgl_batch["seed"]
            for index in (0, 1, 2999):
                body = {**lines(3000)[index]["body"], "seed": line_seed(seed, index)}
                assert found[index]["response"]["body"] == answer(body).body
            assert done.usage == {
                "input_tokens": 21_000,
                "output_tokens": 15_000,
                "total_tokens": 36_000,
                "input_tokens_details": {"cached_tokens": 6000},
                "output_tokens_details": {"reasoning_tokens": 3000},
            }

    asyncio.run(scenario())
