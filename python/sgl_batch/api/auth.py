"""Decides which requests are let in: of users, of the administrator, and of web pages of other origins.

A path that is not listed for users needs the administrator's key: SGLang's control and weight-update endpoints, and
whatever a later SGLang adds. Where it is not one of those that are known, others are told that it does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_batch.api.errors import error_response
from sgl_batch.api.front_options import is_loopback

# Probes without a key read these; they show nothing of requests. `/` is the page without its data.
_OPEN = frozenset({"/", "/health", "/ping"})
_METRICS = "/metrics"
_USER = frozenset(
    {
        *("/generate", "/encode", "/classify", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
        *("/weight_version", "/get_weight_version", "/get_load", "/health_generate", _METRICS),
        *("/tokenize", "/detokenize", "/parse_function_call", "/separate_reasoning"),
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
        *("/invocations", "/vertex_generate"),
        *("/api/chat", "/api/generate", "/api/tags", "/api/show"),
    }
)
_CONTROL = frozenset(
    {
        *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/freeze_gc", "/slow_down"),
        *("/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_ipc"),
        *("/update_weights_from_tensor", "/update_weight_version", "/init_weights_update_group"),
        *("/destroy_weights_update_group", "/init_weights_send_group_for_remote_instance", "/get_weights_by_name"),
        *("/send_weights_to_remote_instance", "/get_remote_instance_transfer_engine_info", "/weights_checker"),
        *("/remote_instance_transfer_engine_info", "/load_lora_adapter", "/load_lora_adapter_from_tensors"),
        *("/unload_lora_adapter", "/release_memory_occupation", "/resume_memory_occupation", "/open_session"),
        *("/close_session", "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
        *("/start_profile", "/stop_profile", "/configure_logging", "/set_trace_level", "/set_internal_state"),
        *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
        *("/dump_expert_distribution_record", "/clear_hicache_storage_backend", "/hicache/storage-backend"),
        *("/hicache/storage-backend/clear", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    }
)
_USER_ROOTS = ("/v1/",)
_OPENAI_PATHS = ("/chat/completions", "/completions", "/models", "/files", "/batches", "/embeddings", "/responses")
_ADMIN_ROOT = "/v1/sgl_batch/instances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused."""

    status_code: int
    message: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The server's keys. Without any key, everyone who reaches the server may do what users do.

    `open_control`: without an admin key, users may control the engine too. `open_metrics`: /metrics needs no key.
    """

    api_key: str | None
    admin_api_key: str | None
    host: str
    open_control: bool = False
    open_metrics: bool = False

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why this request is refused, or None."""
        foreign = self._refusal_of_pages(headers)
        if foreign is not None or path in _OPEN or (self.open_metrics and path == _METRICS):
            return foreign
        key = _bearer(headers.get("authorization"))
        if _same(key, self.admin_api_key):
            return None
        if is_unknown(path) and not self.open_control and (self.api_key is None or _same(key, self.api_key)):
            return _absent(path)
        if is_for_admin(path) and self.admin_api_key is not None:
            return _bad_key(key, "--admin-api-key")
        if is_for_admin(path) and not self.open_control:
            message = (
                f"{path} controls the engine, which is off on this server: start it with an "
                "admin key (--admin-api-key-file FILE) and send that key here, or start it with "
                "--allow-unauthenticated-control"
            )
            return Refusal(status_code=403, message=message, code="control_disabled")
        if self.api_key is None or _same(key, self.api_key):
            return None
        return _bad_key(key, "--api-key")

    def _refusal_of_pages(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse web pages of other origins: a page must not use what its reader's browser can reach."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and _split(origin).netloc != host:
            message = f"requests of web pages of another origin are not answered (origin: {origin})"
            return Refusal(status_code=403, message=message, code="foreign_origin")
        # A page can let its own name point to this machine; then the request has the page's own origin.
        name = _split(f"//{host}").hostname or ""
        if self.api_key is None and is_loopback(self.host) and host and not is_loopback(name):
            message = f"without an API key this server answers only to the names of loopback, not to {name or host!r}"
            return Refusal(status_code=403, message=message, code="foreign_host")
        return None


def is_for_admin(path: str) -> bool:
    """Return whether a path needs the administrator's key. A path with `.` or `..` in it always does."""
    if {".", ".."} & set(path.split("/")):
        return True
    if path == _ADMIN_ROOT or path.startswith(_ADMIN_ROOT + "/"):
        return True
    return not (path in _OPEN or path in _USER or path.startswith(_USER_ROOTS))


def is_unknown(path: str) -> bool:
    """Return whether a path is neither one of users nor one of those that are known to control the engine."""
    return is_for_admin(path) and path not in _CONTROL and not path.startswith(_ADMIN_ROOT)


def _absent(path: str) -> Refusal:
    is_openai = path.startswith(_OPENAI_PATHS)
    remedy = f"OpenAI's paths begin with /v1: /v1{path}" if is_openai else "/docs lists all paths"
    return Refusal(status_code=404, message=f"there is no path {path} here; {remedy}", code="not_found")


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. A text that is not a URL has empty parts, which match no origin."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _bearer(header: str | None) -> str | None:
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else None


def _same(key: str | None, wanted: str | None) -> bool:
    return key is not None and wanted is not None and secrets.compare_digest(key.encode(), wanted.encode())


def _bad_key(key: str | None, flag: str) -> Refusal:
    message = "no API key was given" if key is None else "this API key is wrong"
    message += f": send the server's {flag} as `Authorization: Bearer KEY`"
    return Refusal(status_code=401, message=message, code="invalid_api_key")


class AccessMiddleware:
    """Answers refused requests, and passes the others on unchanged."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._rules.refusal(scope["path"], Headers(scope=scope))
            if refusal is not None:
                headers = {"WWW-Authenticate": "Bearer"} if refusal.status_code == 401 else None
                answer = error_response(refusal.status_code, refusal.message, code=refusal.code, headers=headers)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
