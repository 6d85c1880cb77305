"""The server takes its own flags, passes the engine's on, and refuses to be open to all by mistake."""

from __future__ import annotations

import pytest

from sgl_batch.api.front_options import parse_front_options
from sgl_batch.errors import ConfigError


def test_the_engines_flags_go_on_as_they_are():
    argv = ["--model-path", "m", "--port", "8000", "--tp", "2", "--api-key=k", "--b-moe-decode", "64"]
    options = parse_front_options(argv)
    assert options.engine_argv == ("--model-path", "m", "--tp", "2", "--b-moe-decode", "64")
    assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, "k")


def test_flags_are_not_guessed_from_their_beginnings():
    assert parse_front_options(["--api", "x", "--jobs", "y"]).engine_argv == ("--api", "x", "--jobs", "y")


def test_limits_of_jobs_are_the_services(tmp_path):
    argv = ["--jobs-dir", str(tmp_path), "--max-file-bytes", "1M", "--max-job-lines", "7", "--max-in-flight", "3"]
    argv += ["--max-line-bytes", "2k"]
    service = parse_front_options(argv).service
    assert (service.jobs_dir, service.max_file_bytes) == (tmp_path, 1 << 20)
    assert (service.max_job_lines, service.max_in_flight, service.max_line_bytes) == (7, 3, 2048)


def test_the_price_of_an_hour_is_the_services(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("price-per-hour: 3\n")
    assert parse_front_options([]).service.price_per_hour is None
    assert parse_front_options(["--price-per-hour", "2.5"]).service.price_per_hour == 2.5
    assert parse_front_options(["--config", str(file)]).service.price_per_hour == 3.0
    with pytest.raises(ConfigError, match="--price-per-hour is '-2'; it takes a number"):
        parse_front_options(["--price-per-hour=-2"])


def test_the_level_of_the_log_is_the_engines_too():
    options = parse_front_options(["--log-level", "warning"])
    assert options.log_level == "warning"
    assert options.engine_argv == ("--log-level", "warning")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "my.example"])
def test_an_open_address_needs_a_key_or_the_flag(host):
    with pytest.raises(ConfigError, match="--allow-unauthenticated"):
        parse_front_options(["--host", host])
    with pytest.raises(ConfigError, match="--api-key"):
        parse_front_options(["--host", host, "--admin-api-key", "a"])
    assert parse_front_options(["--host", host, "--api-key", "k"]).host == host
    assert parse_front_options(["--host", host, "--allow-unauthenticated"]).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    assert parse_front_options(["--host", host]).api_key is None


def test_values_of_sglangs_config_file_count_for_the_server_and_the_command_line_wins(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("port: 31000\napi-key: secret\ndtype: float32\n")
    options = parse_front_options(["--config", str(file), "--port", "32000"])
    assert (options.port, options.api_key) == (32000, "secret")
    assert options.engine_argv == ("--config", str(file))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "at most 65535"),
        (["--port", "x"], "invalid int value"),
        (["--max-in-flight", "0"], "at least 1"),
        (["--max-job-lines", "-1"], "at least 1"),
        (["--max-file-bytes", "0"], "at least 1"),
        (["--max-line-bytes", "0"], "--max-line-bytes is 0; it must be at least 1"),
        (["--max-file-bytes", "many"], "--max-file-bytes"),
        (["--engine-stall-s", "-1"], "at least 0"),
        (["--api-key", ""], "is empty"),
        (["--config", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_bad_values_are_refused_with_the_flag(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse_front_options(argv)


def test_control_without_a_key_needs_the_flag_and_no_admin_key():
    assert not parse_front_options([]).open_control
    assert parse_front_options(["--allow-unauthenticated-control"]).open_control
    with pytest.raises(ConfigError, match="leave one"):
        parse_front_options(["--allow-unauthenticated-control", "--admin-api-key", "a"])


@pytest.mark.parametrize("flag", ["--enable-custom-logit-processor", "--enable-custom-logit", "--enable-c"])
def test_programs_in_requests_need_a_key_or_the_flag(flag, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("enable-custom-logit-processor: true\n")
    for argv in ([flag], ["--config", str(file)]):
        with pytest.raises(ConfigError, match="a program that the engine runs"):
            parse_front_options([*argv, "--admin-api-key", "a"])
        for word in (["--api-key", "k"], ["--allow-unauthenticated-control"]):
            assert parse_front_options([*argv, *word]).engine_argv == tuple(argv)
    assert parse_front_options(["--enable-metrics"]).engine_argv == ("--enable-metrics",)
