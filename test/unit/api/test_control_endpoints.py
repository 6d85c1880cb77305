"""What SGLang itself guards with its admin key, a user's key does not open here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from sgl_batch.api.auth import is_for_admin


def guarded_paths(source: str) -> set[str]:
    """The paths of the routes in SGLang's `source` that have an auth level above the normal one."""
    paths = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        if any("AuthLevel.ADMIN" in ast.unparse(call) for call in calls):
            paths |= {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}
    return paths


def test_every_endpoint_that_sglang_guards_needs_the_admin_key():
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    places = Path(spec.origin).parent / "srt" / "entrypoints"
    guarded = set()
    for file in places.glob("*.py"):
        guarded |= guarded_paths(file.read_text("utf-8"))
    assert {"/update_weights_from_tensor", "/abort_request", "/pause_generation", "/flush_cache"} <= guarded
    assert {path for path in guarded if not is_for_admin(path)} == set()


def test_endpoints_that_unpickle_what_they_get_need_it_though_sglang_does_not_guard_them():
    assert is_for_admin("/load_lora_adapter_from_tensors")
