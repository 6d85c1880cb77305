"""A user's key opens no endpoint that SGLang guards with its admin key."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from sgl_batch.api.auth import AccessRules, is_for_admin

_SPEC = importlib.util.find_spec("sglang")
assert _SPEC is not None
assert _SPEC.origin is not None
PLACE = Path(_SPEC.origin).parent / "srt" / "entrypoints"


def guarded_paths(source: str) -> set[str]:
    """Return the paths of the routes in SGLang's `source` with an auth level above the normal one."""
    paths = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        if any("AuthLevel.ADMIN" in ast.unparse(call) for call in calls):
            paths |= {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}
    return paths


def test_every_endpoint_that_sglang_guards_needs_the_admin_key():
    guarded = set()
    for file in PLACE.glob("*.py"):
        guarded |= guarded_paths(file.read_text("utf-8"))
    assert {"/update_weights_from_tensor", "/abort_request", "/pause_generation", "/flush_cache"} <= guarded
    assert {path for path in guarded if not is_for_admin(path)} == set()


# SGLang does not guard these. Here they need the admin key: they unpickle, or take the engine's memory.
_NOT_GUARDED = {"/load_lora_adapter_from_tensors", "/set_trace_level", "/open_session", "/close_session"}
_OF_USERS = {
    *("/generate", "/encode", "/classify", "/invocations", "/health_generate", "/tokenize", "/detokenize"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/weight_version", "/get_weight_version"),
    *("/get_load", "/parse_function_call", "/separate_reasoning"),
}
_OPEN = {"/", "/health", "/ping"}


def all_paths(source: str) -> set[str]:
    """Return the paths of all literal routes in SGLang's `source`."""
    calls = [
        decorator
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith(("app.", "router."))
    ]
    written = {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    return {path for path in written if isinstance(path, str)}


def test_every_endpoint_of_sglang_is_for_users_or_the_administrator():
    paths = set()
    for name in ("http_server", "elastic_ep", "v1_loads"):
        paths |= all_paths((PLACE / f"{name}.py").read_text("utf-8"))
    guarded = {path for path in paths if is_for_admin(path)}
    assert guarded >= _NOT_GUARDED
    assert paths - guarded == {path for path in paths if path.startswith("/v1/")} | _OF_USERS | _OPEN
    rules = AccessRules(api_key="key", admin_api_key=None, host="127.0.0.1")
    assert {path for path in paths if rules.refusal(path, {"host": "h"}) is None} == _OPEN


def test_the_path_of_an_abort_does_not_show_whose_request_it_ends():
    assert is_for_admin("/abort_request")
