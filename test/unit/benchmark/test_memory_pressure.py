"""Measuring memory pressure: bad arguments end the command with one line, and recomputed tokens are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory import main, parse
from memory_pressure.command import build
from memory_pressure.measuring import NO_STORE, ROOMY, STOCK, STORE, STREAMED, Run
from memory_pressure.report import markdown
from memory_pressure.stock_log import Retractions, read_retractions

from sgl_batch.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "--model nowhere is not a checkpoint directory"),
        (["--model", "MODEL", "--rounds", "0"], "--rounds is 0"),
        (["--model", "MODEL", "--pool-share", "0"], "--pool-share is 0.0; it must be more than 0"),
        (["--model", "MODEL", "--num-prompts", "4"], "and the longest sequence has"),
        (["--model", "MODEL", "--output-len", "5000"], "more than the model's context of 4096"),
    ],
)
def test_a_bad_argument_ends_the_command_with_one_line(argv, message, repo_root, capsys, tmp_path):
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    words = [model if word == "MODEL" else word for word in argv]
    assert main(["pressure", *words, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pressure(repo_root, tmp_path):
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    return build(parse(["pressure", "--model", str(model), "--num-prompts", "40"]), tmp_path)


def test_all_cases_but_the_roomy_one_have_the_same_device_and_one_has_a_store_for_all(pressure):
    pools = {case.name: case.arguments["max_total_tokens"] for case in pressure.cases}
    assert pools == dict.fromkeys((STREAMED, STORE, NO_STORE, STOCK), pressure.pool_tokens) | {
        ROOMY: pressure.need_tokens
    }
    assert 0.09 < pressure.pool_tokens / pressure.need_tokens <= 0.1
    assert [case.name for case in pressure.cases if "kv_store_bytes" in case.arguments] == [STREAMED, STORE]


LOG = """\
[t] Prefill batch [1], #new-seq: 2, #new-token: 32, #cached-token: 0, token usage: 0.00
[t] Prefill batch [2], #new-seq: 2, #new-token: 200, #cached-token: 0, token usage: 0.00
[t] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 120, #new_token_ratio: 0.7 -> 0.9
[t] Decode batch, #running-req: 1
[t] Prefill batch [3], #new-seq: 1, #new-token: 121, #cached-token: 0, token usage: 0.10
"""


def test_tokens_that_stock_prefilled_beyond_the_prompts_count_as_recomputed_except_one_a_sequence():
    assert read_retractions(LOG, prompt_tokens=232) == Retractions(sequences=1, tokens=120)


def run(seconds: float, *, again: int = 0, token: int = 1, **counters: int) -> Run:
    return Run(
        seconds=seconds,
        interrupted=again,
        recomputed_tokens=120 * again,
        peak_rss_bytes=1 << 30,
        cpus_of_others=0.5,
        part_s={"attention": 1.0, "copies": 0.5} if counters else {},
        counters=counters,
        outputs=[[token]],
    )


def test_the_report_has_a_row_for_each_case_and_notes_tokens_that_differ(pressure):
    done = {
        STREAMED: run(8.0, decode_rows=100, decode_steps=10),
        STORE: run(10.0, again=3, decode_rows=70, decode_steps=10),
        NO_STORE: run(12.0, decode_rows=60, decode_steps=10),
        STOCK: run(40.0, again=5),
        ROOMY: run(5.0, decode_rows=400, decode_steps=10),
    }
    text = markdown(pressure, [done, done])
    first_table = text.partition("Seconds by part")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first_table.splitlines() if "| " in line]
    rows = {line[0]: line[1:] for line in lines}
    tokens = pressure.workload.prompt_tokens + pressure.workload.output_tokens
    assert rows[STORE] == ["10.0", f"{tokens / 10:,.0f}", "4.00 (4.00-4.00)", "3", "360", "7.0", "1.0"]
    assert rows[STOCK] == ["40.0", f"{tokens / 40:,.0f}", "1.00 (1.00-1.00)", "5", "600", "?", "1.0"]
    assert "the same tokens" in text
    other = {**done, NO_STORE: run(12.0, token=2, decode_rows=60, decode_steps=10)}
    assert "2 DIFFERENT sets of tokens" in markdown(pressure, [done, other])
    assert markdown(pressure, []) == ""


def test_a_share_that_holds_no_whole_sequence_is_refused(repo_root, tmp_path: Path):
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    with pytest.raises(ConfigError, match="raise it"):
        build(parse(["pressure", "--model", model, "--pool-share", "0.001"]), tmp_path)
