"""Decides which of SGLang's control routes reach several instances, and merges the answers of all. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sgl_batch.control_plane.instances.http_messages import Controlled
from sgl_batch.control_plane.instances.service_state import FROM_TENSOR, fields_of

_GROUP = "the process group of a trainer has one rank for each rank of one engine"
_REFUSED = {
    "/init_weights_update_group": _GROUP,
    "/destroy_weights_update_group": _GROUP,
    "/update_weights_from_distributed": _GROUP,
    "/init_weights_send_group_for_remote_instance": _GROUP,
    "/send_weights_to_remote_instance": _GROUP,
    "/get_remote_instance_transfer_engine_info": "it names the memory of one engine",
    "/remote_instance_transfer_engine_info": "it names the memory of one engine",
    "/update_weights_from_ipc": "handles of memory can be opened on one machine, once",
    "/release_memory_occupation": "an instance that starts meanwhile has no memory released",
    "/resume_memory_occupation": "an instance that has started meanwhile has no memory released",
    "/load_lora_adapter": "an instance that starts later does not have the adapter",
    "/load_lora_adapter_from_tensors": "an instance that starts later does not have the adapter",
    "/unload_lora_adapter": "an instance that starts later has the adapters of its command line",
    "/open_session": "the requests of a session must reach one engine",
    "/close_session": "the requests of a session must reach one engine",
}
_HANDLES = 'tensors in shared memory can be opened on one machine, once: send them with "load_format": "safetensors"'


def refusal(path: str, body: bytes | None) -> str | None:
    """Return why a control route is not answered with instances, or None."""
    reason = _REFUSED.get(path)
    if path == FROM_TENSOR and fields_of(body).get("load_format") != "safetensors":
        reason = _HANDLES
    return None if reason is None else f"{path} is not answered with instances: {reason}"


def merged(path: str, answers: Mapping[str, Controlled]) -> tuple[int, dict[str, Any]]:
    """Return the status and body of the one answer to a request that controls engines.

    Args:
        path: Of the request.
        answers: Those of the instances by name; at least one was ready.

    Returns:
        200 and success if all ready instances have succeeded. `weight_version` is null where they have different ones.
    """
    ready = {name: one for name, one in answers.items() if one.status}
    failed = [name for name, one in ready.items() if one.status != 200]
    versions = {one.weight_version for one in ready.values()}
    message = f"{path}: {len(ready) - len(failed)} of {len(ready)} ready instances have succeeded"
    if failed:
        message += f"; failed: {', '.join(failed)}"
    body = {
        "success": not failed,
        "message": message,
        "weight_version": next(iter(versions)) if len(versions) == 1 else None,
        "instances": {name: _one(answer) for name, answer in answers.items()},
    }
    return max((ready[name].status for name in failed), default=200), body


def _one(answer: Controlled) -> dict[str, Any]:
    """Return what one instance says: the fields of its answer, or its text as a message."""
    content: Any = answer.body.decode(errors="replace").strip()
    if answer.content_type == "application/json":
        content = json.loads(answer.body)
    fields = content if isinstance(content, dict) else {"message": content}
    success = answer.status == 200 if answer.status else None
    return {"success": success, **fields, "weight_version": answer.weight_version}
