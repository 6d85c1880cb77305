"""The command line of `sgl-batch run`: defaults, flags for the engine, checks before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_batch.cli.run.options import check_paths, parse_run_options
from sgl_batch.errors import ConfigError


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    return path


def parse(source, *more, output=None):
    output = output or source.with_name("out.jsonl")
    return parse_run_options(["-i", str(source), "-o", str(output), "--model", "org/moe", *more])


def test_errors_manifest_and_spool_lie_beside_the_output(source):
    options = parse(source)
    assert options.errors == source.with_name("out.errors.jsonl")
    assert options.manifest == source.with_name("out.manifest.json")
    assert options.spool_dir == source.parent
    assert (options.seed, options.limit, options.max_in_flight) == (0, None, 2048)
    check_paths(options)


def test_engine_flags_known_or_not_are_passed_on_in_order(source):
    options = parse(source, "--dtype=float32", "--b-attn-decode", "4", "--tp", "2", "--chat-template", "a b")
    assert options.engine_argv == (
        "--model-path",
        "org/moe",
        "--dtype",
        "float32",
        "--log-level",
        "error",
        "--b-attn-decode",
        "4",
        "--tp",
        "2",
        "--chat-template",
        "a b",
    )


def test_a_log_level_of_the_users_own_is_kept(source):
    assert parse(source, "--log-level", "debug").engine_argv[2:] == ("--log-level", "debug")
    assert parse(source, "--log-level=debug").engine_argv[2:] == ("--log-level=debug",)


def test_flags_are_not_abbreviated_behind_the_engines_back(source):
    assert parse(source, "--lim", "3").engine_argv[-2:] == ("--lim", "3")


def test_the_longest_line_is_a_size(source):
    assert parse(source, "--max-line-bytes", "1.5M").max_line_bytes == 3 << 19


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "-1"], r"--seed is -1; it must be at least 0"),
        (["--seed", str(2**63)], r"at most 9223372036854775807"),
        (["--limit", "0"], r"--limit is 0"),
        (["--max-in-flight", "0"], r"--max-in-flight is 0"),
        (["--max-line-bytes", "-5"], r"--max-line-bytes is -5"),
        (["--max-line-bytes", "5 MB"], r"--max-line-bytes is '5 MB'; it takes a number of bytes"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_limit(source, argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(source, *argv)


def refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_paths(options)


def test_a_missing_input_is_named(tmp_path):
    refused(parse(tmp_path / "none.jsonl"), r"none\.jsonl does not exist")


def test_a_directory_without_a_table_is_refused_as_input(tmp_path):
    refused(parse(tmp_path, output=tmp_path / "o.jsonl"), "is a directory with neither a dataset")


@pytest.mark.parametrize("existing", ["out.jsonl", "out.errors.jsonl", "out.manifest.json"])
def test_an_existing_file_is_only_replaced_when_asked(source, existing):
    source.with_name(existing).write_text("precious")
    refused(parse(source), "--overwrite")
    check_paths(parse(source, "--overwrite"))
    assert source.with_name(existing).read_text() == "precious"


def test_the_input_is_never_an_output(source):
    refused(parse(source, "--overwrite", output=source), "also the input")
    refused(parse(source, "--overwrite", "--errors", str(source)), "also the input")


def test_output_and_error_file_differ(source):
    refused(parse(source, "--errors", str(source.with_name("out.jsonl"))), "also the output")


def test_an_output_without_a_directory_is_refused(source, tmp_path):
    refused(parse(source, output=tmp_path / "none" / "out.jsonl"), "make .*none first")


def test_standard_output_is_refused_with_the_reason(source):
    refused(parse(source, output="-"), "manifest")


def test_a_device_is_refused_as_output(source):
    refused(parse(source, "--overwrite", output=Path("/dev/null")), "not a regular file")


def test_a_model_path_that_does_not_exist_is_named_but_a_hub_name_is_not(source):
    refused(parse(source, "--model", "./none/moe"), r"\./none/moe does not exist")
    check_paths(parse(source, "--model", "org/moe"))


def test_a_spool_directory_must_exist(source, tmp_path):
    refused(parse(source, "--spool-dir", str(tmp_path / "none")), "--spool-dir")


@pytest.mark.parametrize("output", [".", "/", ""])
def test_an_output_names_a_file(source, output):
    argv = ["-i", str(source), "-o", output, "--model", "org/moe"]
    with pytest.raises(ConfigError, match="names no file"):
        parse_run_options(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("--body", '{"max_tokens": 2}'),
        ("--chat-column", "question"),
        ("--prompt-column", "question"),
        ("--id-column", "key"),
    ],
)
@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "-"])
def test_flags_for_rows_are_refused_for_what_is_no_table(source, name, argv):
    source.with_name("in.parquet").write_text("{}\n")
    given = name if name == "-" else source.with_name(name)
    options = parse(given, *argv, output=source.with_name("out.jsonl"))
    with pytest.raises(ConfigError, match=f"^{argv[0]} makes requests of the rows of a table"):
        check_paths(options)
