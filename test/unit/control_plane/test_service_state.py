"""What of the requests that control engines is repeated on an engine that starts later."""

from __future__ import annotations

import json

import pytest

from sgl_batch.control_plane.instances import service_state as module
from sgl_batch.control_plane.instances.service_state import NotRepeatableError, ServiceState, changed, gained, missing

NEW = ServiceState()
DISK = b'{"model_path": "b"}'


def after(*requests: tuple[str, bytes | None]) -> ServiceState:
    state = NEW
    for path, body in requests:
        state = changed(state, path, body)
    return state


def test_a_new_engine_gets_the_last_weights_and_the_pause() -> None:
    state = after((module.FROM_DISK, b'{"model_path": "a"}'), (module.PAUSE, b'{"mode": "retract"}'))
    state = changed(state, module.FROM_DISK, DISK)
    assert missing(NEW, state) == [(module.FROM_DISK, DISK), (module.PAUSE, b'{"mode": "retract"}')]
    assert missing(state, state) == []


def test_an_engine_that_goes_on_gets_no_pause() -> None:
    paused = after((module.PAUSE, None))
    assert missing(NEW, changed(paused, module.CONTINUE, b"{}")) == []
    assert missing(paused, NEW) == [(module.CONTINUE, b"{}")]


def test_a_name_of_weights_is_given_after_them() -> None:
    state = after((module.FROM_DISK, DISK), (module.VERSION, b'{"new_version": "7"}'))
    (first, second) = missing(NEW, state)
    assert first == (module.FROM_DISK, DISK)
    assert json.loads(second[1]) == {"new_version": "7", "abort_all_requests": False}


def test_weights_from_tensors_are_not_repeated_but_superseded_by_those_on_disk() -> None:
    state = after((module.FROM_DISK, DISK), (module.FROM_TENSOR, b'{"weight_version": "8"}'))
    with pytest.raises(NotRepeatableError, match="an update from tensors \\(weight_version 8\\), which is not kept"):
        missing(NEW, state)
    assert missing(NEW, changed(state, module.FROM_DISK, DISK)) == [(module.FROM_DISK, DISK)]


def test_the_same_weights_loaded_again_are_others() -> None:
    first = after((module.FROM_DISK, DISK))
    assert missing(first, changed(first, module.FROM_DISK, DISK)) == [(module.FROM_DISK, DISK)]


def test_an_engine_that_missed_an_update_has_the_weights_only_after_all_were_loaded() -> None:
    first = after((module.FROM_DISK, DISK))
    second = changed(first, module.FROM_TENSOR, b"{}")
    assert gained(NEW, module.FROM_TENSOR, first, second) == NEW
    assert gained(first, module.FROM_TENSOR, first, second) == second
    third = changed(second, module.FROM_DISK, DISK)
    assert gained(NEW, module.FROM_DISK, second, third) == third
    paused = changed(first, module.PAUSE, b"{}")
    assert gained(NEW, module.PAUSE, first, paused) == changed(NEW, module.PAUSE, b"{}")


def test_engines_do_not_go_back_to_the_weights_with_which_they_start() -> None:
    with pytest.raises(NotRepeatableError, match="it has other weights"):
        missing(after((module.FROM_DISK, DISK)), NEW)
