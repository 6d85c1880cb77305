"""Users reach requests and jobs, the administrator also the engine, and foreign web pages nothing."""

from __future__ import annotations

import pytest

from sgl_batch.api.auth import AccessRules, is_for_admin, is_unknown
from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.entrypoints.http_server import app as engine_app

USER, ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}


def rules(
    *, api_key: str | None = None, admin: str | None = None, host: str = "127.0.0.1", **opened: bool
) -> AccessRules:
    return AccessRules(api_key=api_key, admin_api_key=admin, host=host, **opened)


def status(given: AccessRules, path: str, headers: dict[str, str] | None = None) -> int:
    refusal = given.refusal(path, {"host": "127.0.0.1:30000", **(headers or {})})
    return 200 if refusal is None else refusal.status_code


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1", "/v1/completions", "/generate", "/server_info"])
def test_with_a_key_requests_need_it(path):
    assert status(rules(api_key="user"), path) == 401
    assert status(rules(api_key="user"), path, {"authorization": "Bearer other"}) == 401
    assert status(rules(api_key="user"), path, {"authorization": "Basic user"}) == 401
    assert status(rules(api_key="user"), path, USER) == 200


def test_keys_of_other_letters_are_refused_and_do_not_fail():
    assert status(rules(api_key="user"), "/v1/files", {"authorization": "Bearer üser"}) == 401


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/abort_request", "/flush_cache"])
def test_control_needs_the_admin_key(path):
    both = rules(api_key="user", admin="admin")
    assert status(both, path) == 401
    assert status(both, path, USER) == 401
    assert status(both, path, ADMIN) == 200
    assert status(rules(api_key="user"), path, USER) == 403
    assert status(rules(admin="admin"), path) == 401
    assert status(rules(admin="admin"), path, ADMIN) == 200


@pytest.mark.parametrize("path", ["/anything_new", "/v1/../anything", "/Flush_cache"])
def test_an_unknown_path_is_the_admins_alone_and_does_not_exist_for_others(path):
    both = rules(api_key="user", admin="admin")
    assert status(both, path) == 401
    assert status(both, path, {"authorization": "Bearer other"}) == 401
    assert status(both, path, USER) == 404
    assert status(both, path, ADMIN) == 200
    assert status(rules(), path) == 404
    assert status(rules(open_control=True), path) == 200


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/batches/batch_1"])
def test_a_path_without_v1_gets_the_whole_one(path):
    refusal = rules().refusal(path, {"host": "127.0.0.1"})
    assert refusal is not None
    assert (refusal.status_code, refusal.code) == (404, "not_found")
    assert f" /v1{path}" in refusal.message


def test_every_path_of_the_engine_is_known():
    paths = {route.path for route in engine_app.routes if getattr(route, "path", None)}
    assert len(paths) > 80
    assert sorted(path for path in paths if is_unknown(path)) == [], "say in auth.py whose it is"


def test_the_admin_key_also_opens_the_endpoints_of_users():
    assert status(rules(api_key="user", admin="admin"), "/v1/files", ADMIN) == 200


def test_with_only_an_admin_key_users_need_none():
    assert status(rules(admin="admin"), "/v1/files") == 200


def test_without_any_key_users_are_let_in_and_control_is_not():
    assert status(rules(), "/v1/files") == 200
    refusal = rules().refusal("/flush_cache", {"host": "127.0.0.1"})
    assert refusal is not None
    assert (refusal.status_code, refusal.code) == (403, "control_disabled")
    assert "--admin-api-key-file" in refusal.message
    assert "--allow-unauthenticated-control" in refusal.message


def test_a_flag_gives_control_to_users():
    assert status(rules(open_control=True), "/flush_cache") == 200
    assert status(rules(open_control=True, api_key="user"), "/flush_cache") == 401
    assert status(rules(open_control=True, api_key="user"), "/flush_cache", USER) == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_probes_need_no_key(path):
    assert status(rules(api_key="user", admin="admin"), path) == 200


@pytest.mark.parametrize("path", ["/metrics", "/health_generate"])
def test_metrics_and_generation_need_the_users_key(path):
    for given in (rules(api_key="user", admin="admin"), rules(api_key="user", open_control=True)):
        assert status(given, path) == 401
        assert status(given, path, USER) == 200
    assert status(rules(), path) == 200
    assert status(rules(api_key="user", open_metrics=True), path) == (200 if path == "/metrics" else 401)


@pytest.mark.parametrize("path", ["/v1/../flush_cache", "//flush_cache", "/v1/./x", "/V1/x", "/metrics/x", "/healthy"])
def test_paths_with_dots_need_the_admin_key(path):
    assert is_for_admin(path)


def test_pages_of_other_origins_are_refused():
    for given in (rules(), rules(api_key="user")):
        assert status(given, "/v1/files", {**USER, "origin": "https://evil.example"}) == 403
        assert status(given, "/health", {"origin": "null"}) == 403
        assert status(given, "/v1/files", {**USER, "origin": "http://127.0.0.1:30000"}) == 200


def test_without_a_key_a_foreign_name_for_loopback_is_refused():
    assert status(rules(), "/v1/files", {"host": "evil.example:30000"}) == 403
    assert status(rules(), "/v1/files", {"host": "localhost:30000"}) == 200
    assert status(rules(), "/v1/files", {"host": "[::1]:30000"}) == 200
    assert status(rules(api_key="user"), "/v1/files", {**USER, "host": "my.example"}) == 200
    assert status(rules(host="0.0.0.0"), "/v1/files", {"host": "my.example"}) == 200
