"""Decides from a model's config which models cannot be computed correctly here, and why.

Reasons are read from the fields of the config, so that they apply to new models too; the architecture's name decides
only where no field does. Whether a model's files exist, and whether SGLang knows its architecture, is checked elsewhere
(checkpoint/, startup/).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.config import BatchConfig
from sgl_batch.core.config_forms import unreadable
from sgl_batch.core.quantised_form import QuantisedFormError, quantised_form
from sgl_batch.core.supported_models import CPU, GPU, ModelFamily, Status, family_named, format_of
from sgl_batch.errors import ConfigError

Config = Mapping[str, Any]

TEXT_PARTS = ("text_config", "llm_config", "language_config")
_NO_GENERATION = re.compile(r"Classification|Reward|Embedding|MaskedLM|(?<!LMHead)(?<!ChatGLM)Model$")
_DRAFT = re.compile(r"NextN|MTP|Eagle|DSpark|DFlash|Assistant")
_MULTIMODAL = re.compile(r"ForConditionalGeneration|VL(?![a-z])|Vision|OCR|ASR|Omni|MultiModal|4MM|^MiniCPM[VO]")
_OTHER_SENSES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual", "audio_processor")
_BY_DIFFUSION = ("SDARForCausalLM", "SDARMoeForCausalLM", "LLaDA2MoeModelLM")
# Layers that carry a state from token to token in place of KV.
_STATES = re.compile(
    r"(use_)?(n_)?mamba|ssm_|linear_(attn|attention|num|key|value|conv)|lightning|rwkv|time_mix|recurrent"
    r"|(short_)?conv(_l_cache|_kernel|1d_width)|state_size|hybrid_override_pattern|layer_group_size"
)
_SPARSE = re.compile(r"index_(topk|n_heads|head_dim)|sparse_att|compress_r|(use_)?(nsa|dsa|moba)(_|$)")
_KINDS = ("layer_types", "layers_block_type", "block_types")
_PLAIN_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
_UNEQUAL = ("block_configs", "global_head_dim", "swa_head_dim", "num_kv_shared_layers", "use_cla")
# SGLang's models of these divide hidden_size among the heads, whatever head_dim is; its KV pools follow head_dim.
_HEADS_DIVIDE_HIDDEN_SIZE = re.compile(
    r"^(Baichuan|Cohere2?|Deepseek|GraniteMoe|InternLM2|IQuestLoopCoder|MiniCPM|(Quant)?Mixtral|Olmo[2e]?|Orion|Persimmon"
    r"|Qwen2Moe|StableLm|Starcoder2|XverseMoe)ForCausalLM$"
)
# Models for which SGLang has a second pool for the KV of layers with a window.
_TWO_POOLS = re.compile(r"^(GptOss|MiMoV2|Step3p[57]|Gemma4|Laguna|Mellum|Inkling)")
# Devices on which SGLang's own models may have windows; on a CPU their tokens have not been checked.
_WINDOW_DEVICES = (GPU,)
# SGLang's models that attend within windows; the others ignore them.
_WINDOWS_BY_SGLANG = re.compile(r"^(Afmoe|Cohere2|Exaone4|ExaoneMoE|Gemma[23]|Olmo3|Transformers)")
_SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap")
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConfig:
    """A config to be judged.

    architecture: the architecture that it names.
    whole: the config.
    device: one of supported_models.DEVICES; None for reasons that hold on all devices.
    context: the most tokens of a sequence; None for the model's own number.
    """

    architecture: str
    whole: Config
    device: str | None
    context: int | None

    @property
    def parts(self) -> Iterator[Config]:
        """The config, and its parts that describe the text model."""
        yield self.whole
        yield from (part for name in TEXT_PARTS if isinstance(part := self.whole.get(name), Mapping))

    def get(self, *names: str) -> Any:
        """Return the first of these fields whose value is not empty, 0 or false, or None."""
        found = (part.get(name) for part in self.parts for name in names)
        return next((value for value in found if value), None)

    def matching(self, pattern: re.Pattern[str]) -> str | None:
        """Return the first field whose name begins with the pattern and whose value is not empty, 0 or false."""
        named = ((name, value) for part in self.parts for name, value in part.items())
        return next((name for name, value in named if value and pattern.match(name.lower())), None)

    @property
    def family(self) -> ModelFamily | None:
        """The family's row in the table of supported models."""
        return family_named(self.architecture)


def text_part(config: Config) -> Config:
    """Return the part of a config that describes the text model; of most models, the config itself."""
    found = (config.get(name) for name in TEXT_PARTS)
    return next((part for part in found if isinstance(part, Mapping)), config)


def refusal(config: Config, *, device: str | None = None, context: int | None = None) -> str | None:
    """Return why a model with this config is refused, as the end of a sentence, or None if it may run.

    `device`: one of supported_models.DEVICES, or None for reasons that hold on all devices. `context`: the most tokens
    of a sequence, or None for the model's own number.
    """
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "an unknown architecture"
    judged = JudgedConfig(architecture=architecture, whole=config, device=device, context=context)
    return next((why for reason in _REASONS if (why := reason(judged)) is not None), None)


def number_type(config: Config, asked: str = "auto") -> str:
    """Return the number type in which SGLang loads a model's plain weights. `asked`: the value of --dtype."""
    if asked != "auto":
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    parts = (config, text_part(config))
    named = next((part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name)), "float32")
    downcast = "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"
    return downcast if named == "float32" else str(named)


def check_without_adapter(architecture: str, config: BatchConfig, *, num_ranks: int) -> None:
    """Raise ConfigError for options that SGLang's own forward pass, which computes models without an adapter, lacks.

    `num_ranks`: the ranks that share experts; 1 if each rank holds the whole model.
    """
    values = {**config.flat(), "dp_size": num_ranks}
    missing: dict[str, tuple[tuple[object, ...], str, str]] = {  # possible values, why no others, flags
        "on_yield": ((None,), "no sequence yields there", "--on-yield"),
        "mix_prefill": ((0,), "it computes prompts by themselves", "--mix-prefill"),
        "kv_store_mode": (
            ("auto", "exclusive"),
            "its prompts do not leave for a store layer by layer",
            "--kv-store-mode",
        ),
        "decode_kv": (("auto", "resident"), "its steps bring no KV from a store layer by layer", "--decode-kv"),
        "dp_size": ((1,), "its experts cannot lie on several ranks", "--tp, --dp and --ep"),
    }
    for name, (possible, why, flags) in missing.items():
        if values[name] not in possible:
            raise ConfigError(
                f"{name} is {values[name]!r}, and {architecture} has no family adapter, so that SGLang's own forward "
                f"pass computes it: {why}; leave out {flags}"
            )


def _kind_of_model(judged: JudgedConfig) -> str | None:
    name = judged.architecture
    if judged.get("is_encoder_decoder"):
        return "it has an encoder, and only decoders run here"
    if judged.get(*_OTHER_SENSES) or _MULTIMODAL.search(name):
        return "it takes images or sound, and only models of text run here"
    if _DRAFT.search(name):
        return "it is a draft model for speculative decoding, which does not run here"
    if name in _BY_DIFFUSION:
        return "it generates text by diffusion, not one token after another"
    if _NO_GENERATION.search(name):
        return "it generates no text: embeddings, rewards and classes are not computed here"
    return None


def _kind_of_layers(judged: JudgedConfig) -> str | None:
    kinds = judged.get(*_KINDS)
    odd = sorted({str(kind) for kind in kinds} - _PLAIN_KINDS) if isinstance(kinds, list) else []
    if odd == ["chunked_attention"] or judged.get("attention_chunk_size") or judged.architecture.startswith("Llama4"):
        return "its layers attend within chunks, and attention here covers the whole context"
    if any("sparse" in kind or "compressed" in kind for kind in odd):
        return f"it has layers of {odd[0]}, and attention here covers the whole context"
    state = judged.matching(_STATES)
    by_layer = judged.get("attn_type_list")
    if odd or state or (isinstance(by_layer, list) and 0 in by_layer):
        sign = f"layers of {odd[0]}" if odd else f"{state or 'attn_type_list'} in its config"
        return f"it carries a state from token to token besides KV ({sign}), which no memory tier here keeps"
    sparse = judged.matching(_SPARSE)
    if sparse:
        return f"it attends to chosen tokens only ({sparse} in its config), and attention here covers the whole context"
    return None


def _unequal_layers(judged: JudgedConfig) -> str | None:
    lists = [name for name in ("num_attention_heads", "num_key_value_heads") if isinstance(judged.get(name), list)]
    unequal = next((name for name in (*lists, *_UNEQUAL) if judged.get(name)), None)
    if unequal is not None:
        return f"the KV of its layers differs in form ({unequal} in its config), and pages here have one form"
    if _TWO_POOLS.match(judged.architecture) and not covers_windows(judged):
        return "SGLang keeps the KV of its sliding windows in a second pool, which admission here does not count"
    return None


def _heads(judged: JudgedConfig) -> str | None:
    head_dim, hidden, heads = (_number(judged.get(name)) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if not _HEADS_DIVIDE_HIDDEN_SIZE.match(judged.architecture) or not head_dim or not hidden or not heads:
        return None
    if head_dim == hidden // heads:
        return None
    return (
        f"its heads have {head_dim} channels (head_dim in its config), and SGLang's model gives them "
        f"{hidden // heads} (hidden_size / num_attention_heads)"
    )


def _latent(judged: JudgedConfig) -> str | None:
    if judged.get("kv_lora_rank") and not (judged.family is not None and judged.family.latent):
        return "its attention is latent, which needs an adapter of its own"
    value_dim, head_dim = judged.get("v_head_dim"), judged.get("head_dim")
    if value_dim and head_dim not in (None, value_dim) and not judged.get("kv_lora_rank") and judged.device == CPU:
        return f"its values have {value_dim} channels and its keys {head_dim}, and pages on a CPU need the same number"
    return None


def _position_biases(judged: JudgedConfig) -> str | None:
    biases = judged.get("alibi", "use_alibi") or judged.get("position_embedding_type") == "alibi"
    return (
        "attention here adds no position biases (ALiBi)" if biases or judged.architecture.startswith("Bloom") else None
    )


def _windows(judged: JudgedConfig) -> str | None:
    window, context = window_of(judged), judged.context or _number(judged.get("max_position_embeddings"))
    if window is None or judged.device is None or (context is not None and context <= window):
        return None
    by_sglang = judged.device in _WINDOW_DEVICES and _WINDOWS_BY_SGLANG.match(judged.architecture)
    if by_sglang or covers_windows(judged):
        return None
    return (
        f"its layers attend only to the last {window} tokens, and attention here covers the whole context "
        f"(with --context-length {window} or less both are the same)"
    )


def covers_windows(judged: JudgedConfig) -> bool:
    """Return whether the model's adapter attends within its windows."""
    return judged.family is not None and judged.family.windows


def window_of(judged: JudgedConfig) -> int | None:
    """Return the number of last tokens to which some layers attend, or None if all attend to the whole context."""
    window, kinds = _number(judged.get("sliding_window", "sliding_window_size")), judged.get("layer_types")
    if isinstance(kinds, list):
        return window if "sliding_attention" in kinds else None
    off = any(part.get("use_sliding_window") is False for part in judged.parts)
    return None if off else window


def _number(value: object) -> int | None:
    """Return a value of a config if it is an integer; a config may hold anything."""
    return value if isinstance(value, int) else None


def _cpu_alone(judged: JudgedConfig) -> str | None:
    if judged.device != CPU:
        return None
    if judged.get(*_SOFT_CAPS):
        return "it caps the logits of attention, which attention on a CPU does not do"
    if isinstance(judged.get("moe_intermediate_size"), list):
        return (
            "its moe_intermediate_size is a list by layer, which SGLang cannot read on a CPU: if all are equal, give "
            "one number with --json-model-override-args"
        )
    asked = judged.get(*QUANTIZATION_FIELDS)
    if not asked:
        return None
    return _quantised(asked if isinstance(asked, Mapping) else {"quant_method": str(asked)})


def _quantised(asked: Config) -> str | None:
    try:
        quantised_form(asked)
    except QuantisedFormError as error:
        return f"its weights are quantised by {error}: {format_of('other').cpu.note}"
    return None


def _form(judged: JudgedConfig) -> str | None:
    # Before the device is known, arguments may still add fields to the config.
    return None if judged.device is None else unreadable(judged.architecture, list(judged.parts))


def _by_its_row(judged: JudgedConfig) -> str | None:
    """Return why the table of supported models refuses the family on this device, as a run has shown."""
    if judged.family is None or judged.device is None:
        return None
    cell = judged.family.on(judged.device)
    return cell.note if cell.status is Status.REFUSED else None


_REASONS: tuple[Callable[[JudgedConfig], str | None], ...] = (
    _kind_of_model,
    _kind_of_layers,
    _unequal_layers,
    _heads,
    _latent,
    _position_biases,
    _windows,
    _cpu_alone,
    _by_its_row,
    _form,
)
