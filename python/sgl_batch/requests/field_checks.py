"""Decides which requests ask for something that is not computed, by the table in request_fields.

Each check raises RefusalError with the field's name. A field that nobody knows is ignored, as SGLang does, unless its
name is nearly that of a field which the endpoint has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from sgl_batch.requests.request_fields import ALLOWED, COMPUTED, MEDIA, MEDIA_PARTS, OTHER_ENGINES, PASSED, REFUSED
from sgl_batch.sglang_adapter.refusals import INVALID_VALUE, RefusalError
from sgl_batch.sglang_adapter.types.messages import GenerationRequest, OpenAIRequest

NOT_SUPPORTED = "unsupported_field"
MISPLACED = "unknown_field"
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
_PLACED_ELSEWHERE = COMPUTED | {"data_parallel_rank"}
_PASSED_EVERYWHERE = PASSED.keys() - _PLACED_ELSEWHERE
_NOT_READ = ("messages", "max_tokens")  # checked elsewhere; reading max_tokens warns that OpenAI has renamed it
_TOKEN_ID = re.compile(r"\d{1,10}", re.ASCII)
_NEAR = 0.88  # of the letters of two names: max_token and max_tokens have 0.94, chat_id and chat_template 0.56
_SHOWN_CHARACTERS = 60
_SHOWN_BITS = 1 << 10


def check_openai_fields(request: OpenAIRequest, given: Mapping[str, object], *, reads_media: bool) -> None:
    """Check a request of an OpenAI endpoint; `given` is the JSON that it was read from."""
    fields = type(request).model_fields
    values = {name: getattr(request, name) for name in fields if name not in _NOT_READ}
    defaults = {name: field.default for name, field in fields.items()}
    _check_values({**_others(given, fields), **values}, defaults, reads_media=reads_media)
    _check_names(given, fields, "this endpoint")
    check_seed("seed", request.seed)
    _check_bias(values.get("logit_bias"))
    for name in ("messages", "prompt"):
        if given.get(name) in ([], ""):
            raise wrong_field(name, f"{name} is empty; give something to answer")
    if given.get("top_logprobs") and "top_logprobs" in fields and not given.get("logprobs"):
        message = "top_logprobs is given without logprobs, and would be ignored: set logprobs to true"
        raise wrong_field("top_logprobs", message)
    if not reads_media:
        for position, message in enumerate(getattr(request, "messages", ())):
            _check_parts(position, message.content)


def check_generation_fields(request: GenerationRequest, given: Mapping[str, object], *, reads_media: bool) -> None:
    """Check a request as SGLang's engine gets it; `given` is its JSON if it came over HTTP in that form, or empty."""
    fields = {field.name: field.default for field in dataclasses.fields(request)}
    values = {name: getattr(request, name) for name in fields}
    _check_values({**_others(given, fields), **values}, fields, reads_media=reads_media)
    _check_names(given, fields, "/generate, which takes sampling parameters in sampling_params")
    for parameters in _sampling_parameters(request):
        _check_values(parameters, {}, reads_media=reads_media)
        _check_bias(parameters.get("logit_bias"))


def check_seed(name: str, value: object) -> None:
    """Check that a seed fits 64 bits."""
    if value is None or (type(value) is int and MIN_SEED <= value <= MAX_SEED):
        return
    raise wrong_field(
        name, f"{name} is {shown(value)}; it must be a whole number of 64 bits, from {MIN_SEED} to {MAX_SEED}"
    )


def wrong_field(name: str, message: str) -> RefusalError:
    """Return the refusal of a value that a field cannot have."""
    return RefusalError(message, code=INVALID_VALUE, param=name)


def shown(value: object) -> str:
    """Return the text of a value, cut to a length that fits a message."""
    # Python refuses to write a number of thousands of digits.
    huge = isinstance(value, int) and value.bit_length() > _SHOWN_BITS
    text = "a number of very many digits" if huge else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def asks(value: object) -> bool:
    """Whether a value asks for anything: null, false and empty values do not."""
    if isinstance(value, list):
        return any(asks(one) for one in value)
    return value is not None and value is not False and value not in ("", {})


def _others(given: Mapping[str, object], fields: Iterable[str]) -> dict[str, object]:
    return {name: given[name] for name in set(given).difference(fields)}


def _sampling_parameters(request: GenerationRequest) -> Iterator[Mapping[str, object]]:
    given = request.sampling_params
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, Mapping):
            yield one


def _check_values(values: Mapping[str, object], defaults: Mapping[str, object], *, reads_media: bool) -> None:
    for name, value in values.items():
        why = REFUSED.get(name) or (None if reads_media else MEDIA.get(name))
        if why is None or not asks(value) or value == defaults.get(name) or value in ALLOWED.get(name, ()):
            continue
        raise RefusalError(f"{name} is not supported: {why}", code=NOT_SUPPORTED, param=name)


def _check_names(given: Mapping[str, object], fields: Iterable[str], where: str) -> None:
    """Refuse fields that would be ignored here: of another endpoint or another engine, and misspelt ones."""
    for name, value in sorted(_others(given, fields).items()):
        if not asks(value) or name in _PASSED_EVERYWHERE:
            continue
        if name in OTHER_ENGINES:
            raise RefusalError(f"{name} is not supported: {OTHER_ENGINES[name]}", code=NOT_SUPPORTED, param=name)
        meant = meant_name(name, (one for one in fields if one in COMPUTED or one in PASSED))
        if meant or name in _PLACED_ELSEWHERE:
            raise RefusalError(f"{name} is no field of {where}{meant}", code=MISPLACED, param=name)


def meant_name(name: str, fields: Iterable[str]) -> str:
    """Return a question whether one of `fields` was meant, or nothing where none is nearly `name`."""
    known = {_letters(one): one for one in fields}
    near = get_close_matches(_letters(name), known, n=1, cutoff=_NEAR)
    return f": did you mean {known[near[0]]}?" if near else ""


def _letters(name: str) -> str:
    """Return a name as maxTokens and max_tokens both have it."""
    return name.lower().replace("_", "").replace("-", "")


def _check_bias(bias: object) -> None:
    """Check that the keys of logit_bias are token ids, which SGLang reads as numbers."""
    for token in bias if isinstance(bias, Mapping) else ():
        if not _TOKEN_ID.fullmatch(str(token)):
            raise wrong_field(
                "logit_bias", f"logit_bias has the key {shown(token)}; each must be a token id, a whole number"
            )


def _check_parts(position: int, content: object) -> None:
    for part in content if isinstance(content, list) else ():
        if part.type in MEDIA_PARTS:
            message = f"messages[{position}] has a part of type {part.type}, and the model served reads text alone"
            raise RefusalError(message, code=NOT_SUPPORTED, param="messages")
