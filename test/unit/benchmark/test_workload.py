"""Workloads: seeded random prompts, the prompts of a JSONL file, and workloads that are refused."""

from __future__ import annotations

import json

import pytest
from comparison.workload import check_fits, jsonl_workload, model_config, random_workload

from sgl_batch.errors import ConfigError


def random_prompts(**changes):
    asked = {"num_prompts": 20, "input_len": 30, "spread": 10, "output_len": 7, "vocabulary": 3072, "seed": 1}
    return random_workload(**{**asked, **changes})


@pytest.fixture
def model(repo_root):
    return repo_root / "test" / "models" / "tiny-qwen3-moe"


@pytest.fixture
def requests(tmp_path):
    bodies = [
        {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 5},
        {"prompt": "Return the", "max_tokens": 9},
        {"prompt": [11, 12, 13]},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"custom_id": str(i), "body": b}) + "\n" for i, b in enumerate(bodies)))
    return path


def test_a_seed_gives_the_same_prompts_and_another_seed_others():
    assert random_prompts().prompts == random_prompts().prompts
    assert random_prompts().prompts != random_prompts(seed=2).prompts


def test_random_prompts_keep_to_their_lengths_and_the_vocabulary():
    found = random_prompts()
    lengths = {len(prompt) for prompt in found.prompts}
    assert min(lengths) >= 20
    assert max(lengths) <= 40
    assert len(lengths) > 1
    assert all(100 <= token < 3072 for prompt in found.prompts for token in prompt)
    assert (found.prompt_tokens, found.output_tokens) == (sum(map(len, found.prompts)), 140)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"output_len": 0}, "--output-len"),
        ({"spread": 30}, "--input-len-spread"),
    ],
)
def test_a_workload_that_cannot_be_names_the_flag_at_fault(change, flag):
    with pytest.raises(ConfigError, match=flag):
        random_prompts(**change)


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"prompt 1 has 30 tokens and 7 to generate.* of 36"):
        check_fits(random_prompts(spread=0), {"max_position_embeddings": 36})
    check_fits(random_prompts(spread=0), {"max_position_embeddings": 37})


def test_request_lines_keep_their_own_output_lengths_unless_one_is_given(requests, model):
    own = jsonl_workload(requests, model, chat=False, num_prompts=None, output_len=None)
    assert own.output_lens == [5, 9, 32]
    assert own.prompts[2] == [11, 12, 13]
    assert jsonl_workload(requests, model, chat=False, num_prompts=2, output_len=3).output_lens == [3, 3]


def test_the_chat_template_is_applied_only_when_asked_for(requests, model):
    plain = jsonl_workload(requests, model, chat=False, num_prompts=1, output_len=None).prompts[0]
    chat = jsonl_workload(requests, model, chat=True, num_prompts=1, output_len=None).prompts[0]
    assert len(chat) > len(plain)


@pytest.mark.parametrize(
    ("line", "fault"), [("nonsense", "line 1 is no JSON object"), ('{"body": {}}', "line 1 is no OpenAI batch request")]
)
def test_a_line_that_is_no_request_is_named(tmp_path, model, line, fault):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=fault):
        jsonl_workload(path, model, chat=False, num_prompts=None, output_len=None)


def test_a_directory_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_config(tmp_path)
