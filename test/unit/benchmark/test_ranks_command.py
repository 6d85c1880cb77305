"""The command that measures ranks: bad arguments end it with one line, before anything is started."""

from __future__ import annotations

import pytest
from ranks import build, main, parse

from sgl_batch.distributed.rank_cores import Cpu
from sgl_batch.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "--model nowhere is not a checkpoint directory"),
        (["--model", "MODEL", "--ranks", "1"], "--ranks is 1"),
        (["--model", "MODEL", "--rounds", "0"], "--rounds is 0"),
        (["--model", "MODEL", "--workload", "trace"], "--workload trace is asked for without --trace"),
        (["--model", "MODEL", "--trace", "nowhere.csv"], "--trace nowhere.csv is not a file"),
        (["--model", "MODEL", "--output-tokens", "200000"], "more than the model's context of 4096"),
    ],
)
def test_a_bad_argument_ends_the_command_with_one_line(argv, message, repo_root, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    assert main([model if word == "MODEL" else word for word in argv]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def _cpu(number: int) -> Cpu:
    return Cpu(socket=0, node=0, core=number, number=number)


def test_every_workload_has_one_case_of_one_rank_on_its_share_of_the_cores(repo_root, tmp_path, monkeypatch):
    monkeypatch.setattr("several_ranks.measuring.read_cpus", lambda _: [_cpu(number) for number in range(4)])
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    found = build(parse(["--model", str(model)]), tmp_path)
    assert [comparison.name for comparison in found] == ["tail", "uneven", "skewed"]
    for comparison in found:
        one_rank = next(case for case in comparison.cases if case.num_ranks == 1)
        assert one_rank.cores == [0, 1]
        assert {case.cores for case in comparison.cases if case is not one_rank} == {None}
    even, skewed, one_rank = found[2].cases
    assert even.model == model.resolve()
    assert skewed.model == one_rank.model == tmp_path


def test_workloads_keep_the_order_given_without_duplicates(repo_root, tmp_path):
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    argv = ["--model", model, "--workload", "skewed", "--workload", "tail", "--workload", "skewed"]
    assert [comparison.name for comparison in build(parse(argv), tmp_path)] == ["skewed", "tail"]
    with pytest.raises(ConfigError, match="--num-prompts is 20"):
        build(parse(["--model", model, "--workload", "tail", "--num-prompts", "20"]), tmp_path)
