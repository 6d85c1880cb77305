"""Mistakes in the engine's flags are reported with what may have been meant."""

from __future__ import annotations

import logging
import re

import pytest

from sgl_batch.config_flags import given_in
from sgl_batch.engine.engine_arguments import _Parser, build_parser
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter import faults, processes
from sgl_batch.startup.argument_checks import check_names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--b-moe-decodes", "5"], "unrecognized arguments: --b-moe-decodes 5; did you mean --b-moe-decode?"),
        (["--ouput=x"], "unrecognized arguments: --ouput=x; did you mean --output?"),
        (["--zzz"], "unrecognized arguments: --zzz (see --help)"),
        (["--b-moe-decode", "x"], "argument --b-moe-decode: invalid int value: 'x' (see --help)"),
    ],
)
def test_an_unknown_flag_is_reported_with_a_similar_one(argv: list[str], words: str) -> None:
    parser = _Parser(allow_abbrev=False)
    parser.add_argument("--b-moe-decode", type=int)
    parser.near = ("--output",)
    with pytest.raises(ConfigError, match=re.escape(words)):
        parser.parse_args(argv)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("b_moe_decod", "there is no argument b_moe_decod; did you mean b_moe_decode?"),
        ("model_pth", "there is no argument model_pth; did you mean model_path?"),
        ("zzz", "there is no argument zzz"),
    ],
)
def test_an_unknown_argument_of_the_python_engine_is_reported_with_a_similar_one(name: str, words: str) -> None:
    check_names({"model_path": "m"}, processes.argument_names())
    with pytest.raises(ConfigError, match=f"{re.escape(words)}$"):
        check_names({"model_path": "m", name: 1}, processes.argument_names())


def test_a_parsed_command_line_tells_what_was_given_from_defaults_that_are_planned() -> None:
    args = build_parser(["--device", "cpu"]).parse_args(
        ["--model-path", "m", "--device", "cpu", "--b-moe-decode", "256"]
    )
    assert given_in(args) == {"b_moe_decode"}
    assert args.max_running_requests is None, "it follows from b_moe_decode, given or planned"


@pytest.mark.parametrize(("level", "is_shown"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_all_of_sglangs_arguments_are_logged_for_debugging_alone(
    level: int, is_shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(level):
        processes.engine_module.logger.info("server_args=ServerArgs(...)")
        processes.engine_module.logger.info("something else")
    assert ("server_args=ServerArgs(...)" in caplog.text) == is_shown
    assert "something else" in caplog.text


def test_an_assertion_without_a_message_is_reported_by_its_condition() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert faults.error_text(caught.value).startswith("raise AssertionError (test_engine_arguments.py:")
    assert faults.error_text(AssertionError("two\nlines")) == "two lines"
