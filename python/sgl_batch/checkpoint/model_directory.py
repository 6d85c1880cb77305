"""Checks the files of a model before anything slow is imported, and says what makes the model unusable.

It reads names, config.json, the tokenizer, and the headers and some scales of the weights, which takes milliseconds. A
name on the hub is looked up there, or in the local cache.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from sgl_batch.checkpoint.files import check_no_pointer, read_tensors
from sgl_batch.checkpoint.fit import check_scales, check_shapes, check_tokenizer_fits
from sgl_batch.core.model_refusals import QUANTIZATION_FIELDS, text_part
from sgl_batch.core.quantised_form import QuantisedForm, quantised_form
from sgl_batch.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TOKENIZER_PATTERNS = ("*.tiktoken", "tiktoken.model", "tokenization_*.py", "*.tok.json", "tokenizer*.model*")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_PLAIN_LOAD_FORMATS = (None, "auto", "safetensors")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Fields of a quantisation that name the layers that are not quantised.
_SPARED = ("ignore", "ignored_layers", "modules_to_not_convert")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
# Numbers that every config has, by the names that families give them.
_NEEDED = (
    ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim", "model_dim"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("vocab_size", "padded_vocab_size", "n_vocab", "padded_vocab"),
)
_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the command line says that a model and its tokenizer are.

    model: a directory, a .gguf file, or a name on the hub.
    tokenizer: a directory or a name on the hub; None for the model's own.
    load_format: as SGLang's --load-format.
    revision: of a name on the hub.
    needs_tokenizer: whether the engine uses a tokenizer.
    is_overridden: whether flags override fields of the model's config.
    """

    model: str
    tokenizer: str | None = None
    load_format: str | None = None
    revision: str | None = None
    needs_tokenizer: bool = True
    is_overridden: bool = False


def check_model(
    source: ModelSource, is_known: Callable[[str], bool], is_known_quantization: Callable[[str], bool]
) -> None:
    """Raise ConfigError for a model that cannot be loaded.

    `is_known`, `is_known_quantization`: return whether SGLang knows an architecture or a method of quantisation.
    """
    if _REMOTE.match(source.model) or os.environ.get("SGLANG_USE_MODELSCOPE"):
        return
    path, is_here = Path(source.model), Path(source.model).exists()
    if not is_here:
        path = _in_hub("model", source.model, "config.json", source.revision)
    elif path.is_file():
        if path.suffix == ".gguf":
            return
        raise ConfigError(f"the model {path} is a file; name the directory with its config.json and weights")
    config: Mapping[str, Any] = {}
    if not (path / "params.json").exists():  # Mistral's own format, without config.json
        config = _check_config(path, is_known, source.model)
        _check_quantization(config, path / "config.json", is_known_quantization)
    # With a network, weights that are not yet in the hub's cache are fetched when they are loaded.
    if source.load_format in _PLAIN_LOAD_FORMATS and (is_here or _is_offline()):
        _check_weights(path, config, is_overridden=source.is_overridden)
    if source.needs_tokenizer and is_here:
        rows = None if source.is_overridden else _text_part(config).get("vocab_size")
        _check_tokenizer(source.tokenizer or source.model, rows if _is_count(rows) else None)


def model_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return a model's config.json, local or in the hub's cache, or None if it is not on this machine."""
    return next(_text_configs(model, revision), None)


def is_hub_name(model: str) -> bool:
    """Return whether a model of the hub may have this name, which no path from the root or from here has."""
    return _HUB_NAME.fullmatch(model) is not None and not model.startswith(".")


def cached_directory(model: str, revision: str | None = None) -> Path | None:
    """Return the directory of a hub model in the local cache, or None if it is not there."""
    if not is_hub_name(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def num_experts(model: str) -> int | None:
    """Return how many routed experts a layer of a local model has, or None if its config does not say."""
    for part in _text_configs(model, None):
        for name in _EXPERT_COUNTS:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def architectures(model: str, revision: str | None = None) -> tuple[str, ...] | None:
    """Return the architectures that a model's config names, or None without a config on this machine."""
    for part in _text_configs(model, revision):
        return tuple(map(str, part.get("architectures") or ()))
    return None


def has_latent_attention(model: str, revision: str | None = None) -> bool:
    """Return whether a model's config, if it is on this machine, says that its KV is latent."""
    return any(part.get("kv_lora_rank") for part in _text_configs(model, revision))


def quantization(model: str, revision: str | None = None) -> str | None:
    """Return how the weights of a model's experts are quantised, such as "fp8", or None if its config does not say."""
    for part in _text_configs(model, revision):
        for name in QUANTIZATION_FIELDS:
            asked = part.get(name)
            if isinstance(asked, dict) and not any("experts" in str(asked.get(spared)) for spared in _SPARED):
                return str(asked.get("quant_method", name))
    return None


def form_of_weights(model: str, revision: str | None = None) -> QuantisedForm | None:
    """Return how a model's weights are quantised; None if they are not, or without a config on this machine.

    Raises QuantisedFormError.
    """
    for part in _text_configs(model, revision):
        for name in QUANTIZATION_FIELDS:
            asked = part.get(name)
            if isinstance(asked, dict) and asked:
                return quantised_form(asked)
    return None


def _text_configs(model: str, revision: str | None) -> Iterator[dict[str, Any]]:
    """Yield a model's config, local or in the hub's cache, and its part that describes the text model."""
    path = Path(model) / "config.json"
    if not Path(model).exists() and _HUB_NAME.fullmatch(model):
        cached = cached_directory(model, revision)
        path = path if cached is None else cached / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict):
            yield part


def _check_config(directory: Path, is_known: Callable[[str], bool], name: str) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(
            f"the model directory {name} has no config.json; name the directory with it and the weights, as "
            "Hugging Face's save_pretrained makes it"
        )
    config = _json_of(path)
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(architectures, list) or not architectures:
        raise ConfigError(
            f'{path} names no architecture; it needs "architectures": ["Qwen3MoeForCausalLM"], say, as the model\'s '
            "maker gives it"
        )
    if "auto_map" in config:
        return config
    if not any(is_known(str(one)) for one in architectures):
        raise ConfigError(
            f"the model {name} has the architecture {', '.join(map(str, architectures))}, which this SGLang does not "
            "know; choose a model of another family"
        )
    _check_fields(path, config)
    return config


def _json_of(path: Path) -> Any:
    """Return the content of a JSON file. Raises ConfigError if it cannot be read."""
    with path.open("rb") as file:
        check_no_pointer(path, file.read(64))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); restore it from where the model came from") from error


def _check_fields(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a missing field: SGLang would use a default, which belongs to another model."""
    nested = [name for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)]
    if set(nested) - set(QUANTIZATION_FIELDS):
        return  # the fields are in one of the parts; only the family's code knows which
    for names in _NEEDED:
        given = next((config[name] for name in names if name in config), None)
        if not isinstance(given, int) or given < 1:
            raise ConfigError(
                f'{path} has {names[0]} {given!r}; it needs a number there, as in "{names[0]}": 2048: restore it from '
                "where the model came from"
            )


def _check_quantization(config: Mapping[str, Any], path: Path, is_known: Callable[[str], bool]) -> None:
    asked: Mapping[str, Any] = next(
        (config[name] for name in QUANTIZATION_FIELDS if isinstance(config.get(name), dict)), {}
    )
    method = asked.get("quant_method")
    if method is not None and not is_known(str(method)):
        raise ConfigError(
            f"{path} says that the weights are quantised by {method!r}, which this SGLang does not know; name a "
            "checkpoint that is not quantised, or is by a method that it knows (fp8, awq, gptq, compressed-tensors)"
        )


def _check_weights(directory: Path, config: Mapping[str, Any], *, is_overridden: bool) -> None:
    if not any(next(directory.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        raise ConfigError(
            f"the model directory {directory} has no weights (*.safetensors or *.bin); fetch them, or give "
            "--load-format dummy for random ones"
        )
    tensors = read_tensors(directory)
    part = _text_part(config)
    if tensors and not is_overridden:
        experts = next((part[name] for name in _EXPERT_COUNTS if _is_count(part.get(name))), None)
        check_shapes(part, tensors, experts, is_part=part is not config)
    check_scales(tensors)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the text model; empty if it is not one of its direct parts."""
    part = text_part(config)
    return {} if part is config and "thinker_config" in config else part


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _check_tokenizer(name: str, rows: int | None) -> None:
    """Raise ConfigError for a tokenizer that is missing or does not fit. `rows`: rows of the embedding, if known."""
    directory = Path(name)
    if not directory.exists():
        _in_hub("tokenizer", name, "tokenizer_config.json", None)
    if not directory.is_dir():
        return
    for config in _TOKENIZER_CONFIGS:
        if (directory / config).exists():
            _json_of(directory / config)
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).exists()]
    for path in found:
        with path.open("rb") as file:
            begin = file.read(64)
        check_no_pointer(path, begin)
        if not begin:
            raise ConfigError(f"the tokenizer {path} is empty; fetch it again")
        if path.name == "tokenizer.json":
            check_tokenizer_fits(path, rows)
    if found or any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_PATTERNS):
        return
    raise ConfigError(
        f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...); copy the model's own there, or name a "
        "directory that has it with --tokenizer-path"
    )


def _in_hub(kind: str, name: str, file: str, revision: str | None) -> Path:
    """Return the cached directory with `file` of a hub model or tokenizer; the file is fetched if it is not cached."""
    first = name.split("/", maxsplit=1)[0]
    if not is_hub_name(name) or ("/" in name and Path(first).is_dir()):
        raise ConfigError(f"the {kind} {name} does not exist; name a directory, or a {kind} on the hub (ORG/NAME)")
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cached = try_to_load_from_cache(name, file, revision=revision)
    if isinstance(cached, str):
        return Path(cached).parent
    try:
        if not constants.HF_HUB_OFFLINE and not _has_address(constants.ENDPOINT):
            raise LocalEntryNotFoundError(name)
        return Path(hf_hub_download(name, file, revision=revision)).parent
    except GatedRepoError as error:
        why = "access to it has to be granted: ask for access on its page, and set HF_TOKEN"
        raise ConfigError(f"the {kind} {name} cannot be fetched from the hub: {why}") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the {kind} {name} has no revision {revision} on the hub; leave --revision out") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        why = f"nor is there a {kind} of that name on the hub (or it is private: set HF_TOKEN)"
        raise ConfigError(f"there is no directory {name}, {why}") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(
            f"there is no directory {name}, and a {kind} of that name on the hub is not in the cache while {why}; name "
            "a directory that has it, or fetch it where there is a network"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigError(f"the {kind} {name} has no {file} on the hub; name another") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"the {kind} {name} cannot be fetched from the hub: {error}") from error


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _has_address(url: str) -> bool:
    """Return whether a host name can be resolved. The hub's library would retry for half a minute if it cannot."""
    host = urlsplit(url).hostname
    if host is None or getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
