"""Says what a validator (pydantic's) finds wrong in a request body, in a sentence that begins with the field's place.

It does not validate, and knows no field except those that tell the members of a union apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import ErrorDetails

# Where a member of a union refuses one of these, the value was meant for another member.
_TELLS_APART = ("role", "type")
_SHOWN_CHARACTERS = 60
_VALUE_ERROR = "Value error, "


@dataclass(frozen=True, slots=True)
class _Found:
    """One error. `place`: the way to the value. `members`: the members of unions on it, which users do not see."""

    place: tuple[str | int, ...]
    members: tuple[str | int, ...]
    text: str
    value: object
    is_missing: bool

    @property
    def is_of_other_member(self) -> bool:
        return bool(self.place) and self.place[-1] in _TELLS_APART and bool(self.members) and not self.is_missing


def first_fault(errors: Sequence[ErrorDetails], body: object) -> tuple[str, str | None]:
    """Return a message about the first wrong field of `body`, and its place: `messages.0.role`; None for all of it.

    `errors`: pydantic's, at least one. FastAPI's begin each place with "body".
    """
    invalid = next((one for one in errors if one["type"] == "json_invalid"), None)
    if invalid is not None:
        return f"the request body is no JSON: {invalid['ctx']['error']} (at character {invalid['loc'][-1]})", None
    if not isinstance(body, Mapping):
        return no_object(body)
    found = [_found(one, body) for one in errors]
    found = _meant([one for one in found if one.place[:1] == found[0].place[:1]])
    same = [one for one in found if one.place == found[0].place]
    param = ".".join(str(part) for part in same[0].place) or None
    text = "; or ".join(dict.fromkeys(one.text for one in same))
    given = "" if same[0].is_missing else _given(same[0].value)
    return (f"{param}: {text}{given}" if param else text + given), param


def no_object(body: object) -> tuple[str, None]:
    """Return what `first_fault` does for a body that is no JSON object."""
    return f"the request body is {_shown(body)}; give a JSON object", None


def _found(error: ErrorDetails, body: object) -> _Found:
    parts = tuple(error["loc"])
    parts = parts[1:] if parts[:1] == ("body",) else parts
    is_missing = error["type"] == "missing"
    place: list[str | int] = []
    members: list[str | int] = []
    value = body
    for position, part in enumerate(parts):
        is_absent = is_missing and position == len(parts) - 1
        if isinstance(value, Mapping) and (part in value or is_absent):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            members.append(part)
            continue
        place.append(part)
    text = error["msg"].removeprefix(_VALUE_ERROR).removesuffix(".")
    return _Found(tuple(place), tuple(members), text, value, is_missing)


def _meant(found: list[_Found]) -> list[_Found]:
    """Return the errors of the members of a union that a value was meant for: those that take its role or type.

    Where none takes it, the errors of the role or type.
    """
    others = [one for one in found if one.is_of_other_member]
    meant = [one for one in found if not any(one.members[: len(o.members)] == o.members for o in others)]
    return meant or others


def _given(value: object) -> str:
    is_short = isinstance(value, str | int | float | bool) or value is None
    return f" (given: {_shown(value)})" if is_short else ""


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
