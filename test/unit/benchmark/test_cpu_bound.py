"""The bound of a workload on a CPU: products of the checkpoint's matrices, and KV in memory that is new."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from comparison.child import run_child
from comparison.cpu_bound import LeastWork, Part, Step, bound_text, least_work
from comparison.figures import spread
from comparison.workload import Workload, model_config

from tiny_models.quantised import quantise

WORKLOAD = Workload(prompts=[[1] * 10, [2] * 30], output_lens=[5, 1], description="two prompts")
COMPUTED = 40 + 6 - 2  # the last token of an output is not computed


def test_the_least_work_counts_each_matrix_for_the_tokens_that_pass_through_it(repo_root):
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    config, work = model_config(model), least_work(model, WORKLOAD)
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    attention = 2 * hidden * head * (heads + config["num_key_value_heads"])
    experts = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
    layer = attention + experts + hidden * config["num_experts"]
    seen = sum(range(1, 15)) + sum(range(1, 31))
    layers = COMPUTED * layer + seen * 2 * heads * head
    keys_and_values = 2 * hidden * head * config["num_key_value_heads"]
    unread = 38 * (layer - keys_and_values) + (sum(range(1, 10)) + sum(range(1, 30))) * 2 * heads * head
    expected = 2 * (config["num_hidden_layers"] * layers - unread + 6 * hidden * config["vocab_size"])
    assert work.flop == pytest.approx(expected)
    assert work.kv_bytes == 2 * 2 * COMPUTED * config["num_hidden_layers"] * config["num_key_value_heads"] * head


def test_scored_prompts_need_all_of_the_last_layer_and_the_output_matrix_for_each_token(repo_root):
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    config, plain = model_config(model), least_work(model, WORKLOAD)
    scored = least_work(model, replace(WORKLOAD, scores_prompts=True))
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    unread = hidden * head * 2 * heads + hidden * config["num_experts"]  # the last layer's but keys and values
    unread += 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
    seen = sum(range(1, 10)) + sum(range(1, 30))
    expected = 2 * 38 * (unread + hidden * config["vocab_size"]) + 4 * seen * heads * head
    assert scored.flop - plain.flop == pytest.approx(expected)
    assert scored.steps == plain.steps


@pytest.mark.parametrize(("form", "dense_bits", "expert_bits"), [("gptq-4", 5, 5), ("fp8-blocks", 8.25, 9)])
def test_a_step_reads_matrices_in_the_bits_in_which_they_are_kept(repo_root, tmp_path, form, dense_bits, expert_bits):
    plain = repo_root / "test" / "models" / "tiny-qwen3-moe"
    config, small = model_config(plain), quantise(plain, tmp_path / form, form)
    of_floats, grouped = (least_work(model, WORKLOAD).steps[0].parts for model in (plain, small))
    assert [one.flop for one in grouped] == [one.flop for one in of_floats]
    router = 2 * config["num_hidden_layers"] * config["hidden_size"] * config["num_experts"]
    dense, experts = of_floats[1].read_bytes - router, of_floats[2].read_bytes
    assert grouped[1].read_bytes == pytest.approx(dense * dense_bits / 16 + router), "scales of 4 bytes for 32 or 128"
    assert grouped[2].read_bytes == pytest.approx(experts * expert_bits / 16)
    assert grouped[3] == of_floats[3]


def test_a_step_of_decode_reads_the_experts_that_its_tokens_choose_and_their_kv(repo_root):
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    config, work = model_config(model), least_work(model, WORKLOAD)
    alone = least_work(model, Workload(prompts=[[1] * 10], output_lens=[5], description="one prompt"))
    assert [step.whole for step in work.steps] == [step.whole for step in alone.steps]
    assert len(work.steps) == 4
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    attention = 2 * hidden * config["head_dim"] * (heads + config["num_key_value_heads"])
    experts = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
    weights = layers * (attention + experts + hidden * config["num_experts"]) + hidden * config["vocab_size"]
    kv = layers * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert work.steps[0].whole.read_bytes == pytest.approx(2 * (weights + 11 * kv))
    both = Workload(prompts=[[1] * 10, [2] * 10], output_lens=[2, 2], description="two at once")
    others = 1 - config["num_experts_per_tok"] / config["num_experts"]
    more = 2 * (layers * experts * others + 11 * kv)
    assert least_work(model, both).steps[0].whole.read_bytes == pytest.approx(work.steps[0].whole.read_bytes + more)


def test_a_step_takes_as_long_as_the_slower_of_products_and_reads():
    multiplies, reads = Part(flop=4.0, read_bytes=5.0), Part(flop=2.0, read_bytes=30.0)
    apart = LeastWork(prompts_flop=6.0, steps=(Step(parts=(multiplies,)), Step(parts=(reads,))), kv_bytes=1.0)
    together = LeastWork(prompts_flop=6.0, steps=(Step(parts=(multiplies, reads)),), kv_bytes=1.0)
    assert apart.seconds(2.0, 10.0) == apart.seconds_in_turn(2.0, 10.0) == 3.0 + 2.0 + 3.0
    assert together.seconds(2.0, 10.0) == 3.0 + 3.5
    assert together.seconds_in_turn(2.0, 10.0) == 3.0 + 2.0 + 3.0


def test_the_report_says_what_share_of_the_bound_each_engine_reached():
    parts = Part(flop=0.4, read_bytes=18.0), Part(flop=1.6, read_bytes=2.0)
    work = LeastWork(prompts_flop=6.0, steps=(Step(parts=parts),), kv_bytes=3.0)
    rates = [{"flop_per_s": 2.0, "read_bytes_per_s": 10.0, "best_read_bytes_per_s": 20.0, "new_bytes_per_s": 3.0}] * 2
    wall = spread([10.0])
    assert wall is not None
    text = bound_text(work, rates, {"ours": wall})
    assert "take 4.0 s" in text
    assert "bound by these: 5.0 s; 5.6 s where" in text  # by what reads keep up, not by one at best
    assert "take 1.0 s more" in text
    shares = "40% of the products, 50% with the reads, 60% with the new memory too, 66% with parts in turn"
    assert f"ours {shares}" in text


def test_the_rates_are_measured_in_a_process_of_their_own(tmp_path):
    spec, result, log = tmp_path / "spec.json", tmp_path / "result.json", tmp_path / "log"
    sizes = {"new_bytes": 4 << 20, "read_bytes": 1 << 20, "width": 64}
    spec.write_text(json.dumps({**sizes, "times": 1, "kept_up_s": 0.05, "threads": 2}))
    end = run_child(sys.executable, spec, result, log, limit_s=120, threads=1, runner="cpu_rates.py")
    assert end.reason is None
    rates = json.loads(result.read_text())
    assert rates["new_bytes_per_s"] > 0
    assert rates["best_read_bytes_per_s"] >= rates["read_bytes_per_s"] > 0
    assert rates["flop_per_s"] == max(rates["flop_per_s_by_way"].values()) > 0
    assert {"torch", "sgl_batch"} <= rates["flop_per_s_by_way"].keys()
