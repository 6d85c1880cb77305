"""llama.cpp's sequences: continuous batching over as many slots as it has, exact output lengths; it is not needed."""

from __future__ import annotations

import pytest
from runners.llamacpp_offline import Schedule, context_arguments


def run(prompts: list[list[int]], output_lens: list[int], *, slots: int, batch_tokens: int) -> tuple[Schedule, list]:
    """Compute all batches with a model whose next token is the last one plus 1; return them as (slot, token, position).

    Like llama.cpp's KV cache, it takes the tokens of a slot in the order of their positions.
    """
    schedule, batches = Schedule(prompts, output_lens, slots, batch_tokens), []
    length_of = [0] * slots
    while rows := schedule.next_batch():
        assert len(rows) <= batch_tokens
        for row in rows:
            assert row.position == length_of[row.slot], "a token comes right behind those before it"
            length_of[row.slot] += 1
        batches.append([(row.slot, row.token, row.position) for row in rows])
        for slot in schedule.take(rows, [row.token + 1 for row in rows if row.wanted]):
            length_of[slot] = 0
    return schedule, batches


@pytest.mark.parametrize(("slots", "batch_tokens"), [(1, 1), (1, 3), (2, 2), (2, 64), (5, 4), (5, 64)])
def test_every_prompt_gets_its_own_exact_number_of_tokens(slots: int, batch_tokens: int) -> None:
    prompts, lens = [[10], [20, 21, 22], [30, 31], [40, 41, 42, 43, 44], [50]], [3, 1, 4, 2, 5]
    schedule, _ = run(prompts, lens, slots=slots, batch_tokens=batch_tokens)
    assert schedule.outputs == [
        [prompt[-1] + step for step in range(1, count + 1)] for prompt, count in zip(prompts, lens, strict=True)
    ]


def test_sequences_decode_together_and_a_free_slot_takes_the_next_prompt() -> None:
    _, batches = run([[10], [20], [30]], [2, 3, 2], slots=2, batch_tokens=8)
    assert batches == [
        [(0, 10, 0), (1, 20, 0)],
        [(0, 11, 1), (1, 21, 1)],
        [(0, 30, 0)],  # the first is over
        [(1, 22, 2), (0, 31, 1)],
    ]


def test_a_prompt_longer_than_a_batch_comes_in_parts() -> None:
    _, batches = run([[1, 2, 3, 4, 5]], [1], slots=1, batch_tokens=2)
    assert [len(batch) for batch in batches] == [2, 2, 1]


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return {"prompts": [[1] * 200, [2] * 300], "output_lens": [32, 32], "dtype": "bfloat16"}


def test_each_prompt_has_a_slot_with_room_for_the_longest(spec: dict[str, object]) -> None:
    chosen = context_arguments(spec, 256)
    assert (chosen["n_seq_max"], chosen["n_ctx"], chosen["n_threads"], chosen["n_threads_batch"]) == (2, 1024, 3, 3)


def test_no_more_slots_are_asked_for_than_the_library_has(spec: dict[str, object]) -> None:
    chosen = context_arguments(spec, 1)
    assert (chosen["n_seq_max"], chosen["n_ctx"]) == (1, 512)


def test_kv_is_float32_where_float32_is_asked_for(spec: dict[str, object]) -> None:
    assert "type_k" not in context_arguments(spec, 256)
    assert context_arguments({**spec, "dtype": "float32"}, 256)["type_k"] == 0
