"""The requests of the benchmark of shared prefixes."""

from __future__ import annotations

import json

import prefix_sharing
import pytest

from sgl_batch.errors import ConfigError


@pytest.fixture
def questions(tmp_path):
    rows = [{"question": f"How much is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_question_follows_the_same_worked_examples(questions):
    first, second = prefix_sharing.prompts(questions, questions, shots=2, num_prompts=2)
    worked = "Question: How much is 0 + 1?\nAnswer: #### 1\n\nQuestion: How much is 1 + 1?\nAnswer: #### 2\n\n"
    assert first == worked + "Question: How much is 0 + 1?\nAnswer:"
    assert second == worked + "Question: How much is 1 + 1?\nAnswer:"


def test_a_file_of_something_else_is_refused_with_its_line(questions):
    questions.write_text(questions.read_text() + '{"question": "?"}\n')
    with pytest.raises(ConfigError, match=r"questions\.jsonl, line 6 is no"):
        prefix_sharing.prompts(questions, questions, shots=1, num_prompts=6)
