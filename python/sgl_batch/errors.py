"""Owns the exceptions that sgl_batch raises on purpose. How they are shown is decided elsewhere."""

from __future__ import annotations

# The code of a failure that the command line causes: trying again does not help.
BAD_USAGE = "bad_usage"


class SglBatchError(Exception):
    """Base of every error that sgl_batch raises on purpose."""


class ConfigError(SglBatchError):
    """A flag, file or setting of the user cannot work. The message says what, its value, the limit and a remedy."""


class RequestError(SglBatchError):
    """One request is refused. The refusal becomes that request's own error and never stops a job.

    `code` is a stable machine-readable word, `param` names the field at fault, `status_code` is the HTTP status that
    the online endpoint gives for the same request.
    """

    def __init__(self, *, code: str, message: str, param: str | None = None, status_code: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status_code = status_code


class EngineError(SglBatchError):
    """The engine itself is dead or cannot start; no further request can be answered.

    `code`: if all remaining requests fail for one reason that the user can remove, a stable word for that reason.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class StoreError(SglBatchError):
    """The host KV store cannot be written or read any more: a full disk, say. The message says what to do."""

    code = "kv_store_failed"
