"""Decides those of SGLang's arguments that a user leaves open and for which SGLang's own choice is slow or fails.

Each choice is a pure function from the user's arguments and the facts of the machine and the model to arguments and
sentences for the user. `machine_facts` and `model_facts` find the facts. engine/launch decides all other arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sgl_batch.checkpoint.model_directory import architectures, has_latent_attention
from sgl_batch.config import ForwardConfig
from sgl_batch.core.decode_choice import AUTO, MEASURE, SGLANG
from sgl_batch.core.supported_models import has_adapter
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.absent_packages import REQUIREMENTS, has_flash_attention_3, is_installed
from sgl_batch.sglang_adapter.names import CPU_GRAMMAR, TRITON_ATTENTION

_FA3, _FLASHINFER, _XGRAMMAR = "fa3", "flashinfer", "xgrammar"
_HOPPER, _BLACKWELL = 9, 10
# A trimmed wheel satisfies the same requirement, so that pip must be forced.
_WHOLE_KERNELS = f"pip install --force-reinstall --no-deps {REQUIREMENTS['sgl_kernel']}"
_INSTALL = {name: f"pip install {REQUIREMENTS[name]}" for name in (_FLASHINFER, _XGRAMMAR)}
_DISABLED = "disabled"
# SGLang's number on the GPUs that run models with latent attention.
_LATENT_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts of the machine on which choices depend. `capability`: the GPU's compute capability; None is a CPU."""

    capability: tuple[int, int] | None
    flash_attention_3: bool
    flashinfer: bool
    xgrammar: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentChoice:
    """The values of arguments that were open, and sentences that tell the user of the choice."""

    arguments: dict[str, object] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()


def machine_facts(*, on_cpu: bool) -> MachineFacts:
    """Return the facts of this machine. Packages are looked up without an import."""
    return MachineFacts(
        capability=None if on_cpu else torch.cuda.get_device_capability(),
        flash_attention_3=not on_cpu and has_flash_attention_3(),
        flashinfer=is_installed(_FLASHINFER),
        xgrammar=is_installed(_XGRAMMAR),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts of the model on which choices depend. `is_split`: it has a family adapter, which can split groups."""

    is_split: bool
    is_latent: bool


def model_facts(model: str, revision: str | None) -> ModelFacts:
    """Return the facts in a model's config. A model whose config is not here counts as split."""
    known = architectures(model, revision)
    is_split = known is None or any(map(has_adapter, known))
    return ModelFacts(is_split=is_split, is_latent=has_latent_attention(model, revision))


def chosen_arguments(
    given: Mapping[str, object], forward: ForwardConfig, facts: MachineFacts, model: ModelFacts
) -> ArgumentChoice:
    """Return all choices together. Raises ConfigError."""
    choices = [chosen_grammar(given, facts)]
    if facts.capability is not None:
        choices += [chosen_attention(given, facts, model), chosen_sampling(given, facts)]
        choices.append(chosen_graph_sizes(given, forward, model))
    arguments = {name: value for choice in choices for name, value in choice.arguments.items()}
    return ArgumentChoice(
        arguments=arguments, sentences=tuple(words for choice in choices for words in choice.sentences)
    )


def chosen_attention(given: Mapping[str, object], facts: MachineFacts, model: ModelFacts) -> ArgumentChoice:
    """Choose Triton's attention where SGLang's choice is missing or cannot hold the plans of several sub-batches.

    SGLang takes fa3 on Hopper and, before Blackwell, flashinfer elsewhere. Of these, fa3 can hold several plans.
    Raises ConfigError for a backend that is named and missing.
    """
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    named = {name: given[name] for name in names if given.get(name) is not None}
    for name, backend in named.items():
        if backend == _FA3 and not facts.flash_attention_3:
            raise ConfigError(
                f"{name} is {_FA3!r}, and the installed sglang-kernel lacks flash_ops, which implements it: choose "
                f"{TRITON_ATTENTION!r}, or install the whole package ({_WHOLE_KERNELS})"
            )
        if backend == _FLASHINFER and not facts.flashinfer:
            raise ConfigError(_missing(name, _FLASHINFER, f"choose {TRITON_ATTENTION!r}"))
    if named:
        return ArgumentChoice()
    assert facts.capability is not None, "a CPU has our own attention"
    major, _ = facts.capability
    if major == _HOPPER:
        if facts.flash_attention_3:
            return ArgumentChoice()
        return _triton(f"sglang-kernel lacks flash_ops, which implements {_FA3}; {_WHOLE_KERNELS} brings it")
    if major == _BLACKWELL or not model.is_split:
        return ArgumentChoice()
    if not facts.flashinfer:
        return ArgumentChoice(arguments={"attention_backend": TRITON_ATTENTION})  # as SGLang would
    return _triton(
        f"{_FLASHINFER}, SGLang's choice on this GPU, cannot hold the plans of several sub-batches nor share the KV of "
        f"prompts that begin alike; --attention-backend {_FLASHINFER} chooses it anyway"
    )


def _triton(reason: str) -> ArgumentChoice:
    words = f"attention backend: {TRITON_ATTENTION}, because {reason}"
    return ArgumentChoice(arguments={"attention_backend": TRITON_ATTENTION}, sentences=(words,))


def chosen_sampling(given: Mapping[str, object], facts: MachineFacts) -> ArgumentChoice:
    """Choose torch's sampling where flashinfer is missing. Raises ConfigError where the user asks for flashinfer."""
    asked = given.get("sampling_backend")
    if facts.flashinfer:
        return ArgumentChoice()
    if asked == _FLASHINFER:
        raise ConfigError(_missing("sampling_backend", _FLASHINFER, "leave it out"))
    if asked is not None:
        return ArgumentChoice()
    words = f"sampling backend: pytorch, because {_FLASHINFER} is not installed; {_INSTALL[_FLASHINFER]} brings it"
    return ArgumentChoice(arguments={"sampling_backend": "pytorch"}, sentences=(words,))


def chosen_grammar(given: Mapping[str, object], facts: MachineFacts) -> ArgumentChoice:
    """Choose no grammars where xgrammar is missing. Raises ConfigError where the user asks for xgrammar."""
    asked = given.get("grammar_backend")
    if facts.xgrammar or asked not in (None, CPU_GRAMMAR, _XGRAMMAR):
        return ArgumentChoice()
    if asked == _XGRAMMAR:
        raise ConfigError(_missing("grammar_backend", _XGRAMMAR, "leave it out"))
    words = (
        f"grammar backend: none, because {_XGRAMMAR} is not installed: requests for JSON schemas, regular expressions "
        f"and grammars are refused; {_INSTALL[_XGRAMMAR]} brings it"
    )
    return ArgumentChoice(arguments={"grammar_backend": "none"}, sentences=(words,))


def chosen_graph_sizes(given: Mapping[str, object], forward: ForwardConfig, model: ModelFacts) -> ArgumentChoice:
    """Choose SGLang's decode graphs up to the largest group that its own forward may compute.

    By itself SGLang captures graphs up to a size that depends on the GPU's memory, and larger groups run without. With
    latent attention each sequence of the largest graph takes megabytes, so graphs reach groups of moderate size only.
    """
    off = given.get("disable_cuda_graph") or given.get("disable_decode_cuda_graph")
    said = ("cuda_graph_config", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode")
    if off or given.get("cuda_graph_backend_decode") == _DISABLED or any(given.get(name) is not None for name in said):
        return ArgumentChoice()
    largest, one_part = forward.b_moe_decode, forward.b_attn_decode
    if model.is_latent:
        largest = min(one_part or _LATENT_ROWS, largest)
    elif forward.decode_forward not in (AUTO, MEASURE, SGLANG):
        largest = min(one_part or largest, largest)
    return ArgumentChoice(arguments={"cuda_graph_max_bs_decode": largest})


def _missing(name: str, package: str, remedy: str) -> str:
    return f"{name} is {package!r}, which is not installed: {remedy}, or install it ({_INSTALL[package]})"
