"""Blocks of a user's rows have one schema, whichever rows failed, and no failed row ends a run."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sgl_batch.control_plane.data.batches import ADDED, with_answers
from sgl_batch.control_plane.data.row_requests import RowAnswer
from sgl_batch.control_plane.data.user_functions import with_added, with_error

GOOD = RowAnswer(text="4", tokens=[4, 5], num_input_tokens=3)
BAD = RowAnswer(error="too long")


def block(*answers: RowAnswer) -> pa.Table:
    return with_answers(pa.table({"id": list(range(len(answers)))}), answers)


@pytest.mark.parametrize("answers", [[GOOD, GOOD], [GOOD, BAD], [BAD, BAD]])
def test_columns_that_are_handed_on_keep_their_types_also_lists_under_another_name(answers: list[RowAnswer]) -> None:
    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "tokens": row["generated_tokens"], "answer": row["generated_text"].strip()}

    finished = with_error(postprocess)(block(*answers))
    tokens = ADDED.field("generated_tokens").type
    wanted = {"id": pa.int64(), "tokens": tokens, "answer": pa.string(), "__inference_error__": pa.string()}
    assert {field.name: field.type for field in finished.schema} == wanted
    assert finished.column("__inference_error__").to_pylist() == [answer.error for answer in answers]


def test_a_failed_row_for_which_postprocess_raises_keeps_its_columns_and_a_good_one_ends_the_run() -> None:
    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"number": int(row["generated_text"])}

    good, bad = with_error(postprocess)(block(GOOD, BAD)).to_pylist()
    assert (good["number"], bad["number"]) == (4, None)
    assert (bad["id"], bad["__inference_error__"]) == (1, "too long")
    with pytest.raises(ValueError, match="invalid literal"):
        with_error(postprocess)(block(RowAnswer(text="four")))


def test_preprocess_adds_columns_and_the_others_stay() -> None:
    table = pa.table({"id": pa.array([1, 2], pa.int8()), "tags": pa.array([[], []], pa.list_(pa.string()))})
    added = with_added(lambda row: {"prompt": f"number {row['id']}"})(table)
    assert added.schema == table.schema.append(pa.field("prompt", pa.string()))
    assert added.column("prompt").to_pylist() == ["number 1", "number 2"]


def test_values_that_only_ray_can_convert_are_converted() -> None:
    added = with_added(lambda row: {"number": complex(row["id"], 2)})(pa.table({"id": [1]}))
    assert added.column("number").to_pylist() == [1 + 2j]
