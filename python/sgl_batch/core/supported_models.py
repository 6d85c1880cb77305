"""Owns the table of supported models and number formats. checkpoint/ finds out which model a directory holds.

When a family gains an adapter, or a run shows that it is right, only its row here changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Which forward pass computes a model's groups.
COROUTINE, SGLANG = "coroutine", "sglang"
CPU, GPU = "cpu", "gpu"
DEVICES = (CPU, GPU)


class Status(StrEnum):
    """How far a combination is supported. UNRUN: the code exists and has not been run on such a device yet."""

    WORKS = "works"
    UNRUN = "written, not yet run"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The support of one combination. `note`: the reason of a refusal; else what a user should know."""

    status: Status
    note: str = ""


_WORKS, _UNRUN = Cell(status=Status.WORKS), Cell(status=Status.UNRUN)


def _works(note: str) -> Cell:
    return Cell(status=Status.WORKS, note=note)


def _refused(reason: str) -> Cell:
    return Cell(status=Status.REFUSED, note=reason)


def _unrun(note: str) -> Cell:
    return Cell(status=Status.UNRUN, note=note)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One row of the table of models.

    forward: COROUTINE if model_executor/families has an adapter, SGLANG if SGLang's own forward computes it.
    latent: whether the adapter computes latent attention.
    windows: whether the adapter computes attention within windows.
    cpu, gpu: the support on each device. Where a family works, its greedy tokens equal Hugging Face's in float32.
    """

    name: str
    architectures: tuple[str, ...]
    forward: str = SGLANG
    latent: bool = False
    windows: bool = False
    cpu: Cell = _WORKS
    gpu: Cell = _UNRUN

    def on(self, device: str) -> Cell:
        """Return the support on a device."""
        return self.cpu if device == CPU else self.gpu


_NO_HEAD_BIAS = _refused("SGLang leaves out the bias of its output projection, and gives other tokens")

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily("Qwen3-MoE", ("Qwen3MoeForCausalLM",), COROUTINE),
    ModelFamily("Qwen2-MoE", ("Qwen2MoeForCausalLM",), COROUTINE),
    ModelFamily("Mixtral", ("MixtralForCausalLM",), COROUTINE),
    ModelFamily("OLMoE", ("OlmoeForCausalLM",), COROUTINE),
    ModelFamily("GLM-4.5", ("Glm4MoeForCausalLM",), COROUTINE),
    ModelFamily("MiniMax-M2", ("MiniMaxM2ForCausalLM",), COROUTINE),
    ModelFamily("DeepSeek-V2", ("DeepseekV2ForCausalLM",), COROUTINE, latent=True),
    ModelFamily("DeepSeek-V3 and R1, Kimi-K2", ("DeepseekV3ForCausalLM",), COROUTINE, latent=True),
    ModelFamily("gpt-oss", ("GptOssForCausalLM",), COROUTINE, windows=True),
    ModelFamily("Qwen3", ("Qwen3ForCausalLM",), COROUTINE),
    ModelFamily("Qwen2", ("Qwen2ForCausalLM",), COROUTINE),
    ModelFamily("Llama", ("LlamaForCausalLM",), COROUTINE),
    ModelFamily("Mistral", ("MistralForCausalLM",), COROUTINE),
    ModelFamily("Apertus", ("ApertusForCausalLM",)),
    ModelFamily("Arcee", ("ArceeForCausalLM",)),
    ModelFamily("Cohere Command-R", ("CohereForCausalLM",)),
    ModelFamily("Cohere2 (Command R7B, A)", ("Cohere2ForCausalLM",), cpu=_works("sequences no longer than its window")),
    ModelFamily("ERNIE-4.5", ("Ernie4_5ForCausalLM",)),
    ModelFamily("Gemma (first)", ("GemmaForCausalLM",)),
    ModelFamily("GLM-4", ("Glm4ForCausalLM",)),
    ModelFamily("GPT-2", ("GPT2LMHeadModel",)),
    ModelFamily("GPT-BigCode (StarCoder)", ("GPTBigCodeForCausalLM",)),
    ModelFamily("Granite", ("GraniteForCausalLM",)),
    ModelFamily("Granite-MoE", ("GraniteMoeForCausalLM",)),
    ModelFamily("HunYuan-V1, dense", ("HunYuanDenseV1ForCausalLM",), cpu=_works("with use_qk_norm in its config")),
    ModelFamily(
        "HunYuan-V1, MoE",
        ("HunYuanMoEV1ForCausalLM",),
        cpu=_works("moe_intermediate_size must be one number (--json-model-override-args)"),
    ),
    ModelFamily("Ministral-3", ("Ministral3ForCausalLM",)),
    ModelFamily("OLMo", ("OlmoForCausalLM",)),
    ModelFamily("OLMo-2", ("Olmo2ForCausalLM",)),
    ModelFamily("OPT", ("OPTForCausalLM",)),
    ModelFamily("Persimmon", ("PersimmonForCausalLM",)),
    ModelFamily("Phi-3, Phi-4", ("Phi3ForCausalLM",)),
    ModelFamily("Seed-OSS", ("SeedOssForCausalLM",)),
    ModelFamily("SmolLM3", ("SmolLM3ForCausalLM",)),
    ModelFamily("StableLM", ("StableLmForCausalLM",)),
    ModelFamily("StarCoder2", ("Starcoder2ForCausalLM",)),
    ModelFamily(
        "AFMoE (Trinity)", ("AfmoeForCausalLM",), cpu=_refused("SGLang computes its experts by a GPU's kernel")
    ),
    ModelFamily("ERNIE-4.5-MoE", ("Ernie4_5_MoeForCausalLM",), cpu=_refused("SGLang's choice of experts fails there")),
    ModelFamily("DBRX", ("DbrxForCausalLM",), cpu=_refused("SGLang's model of it allocates its experts on a GPU")),
    ModelFamily("EXAONE-4", ("Exaone4ForCausalLM",), cpu=_refused("SGLang wants attention of a GPU for it")),
    ModelFamily("GPT-J", ("GPTJForCausalLM",), cpu=_NO_HEAD_BIAS, gpu=_NO_HEAD_BIAS),
    ModelFamily("Phi-1, Phi-2", ("PhiForCausalLM",), cpu=_NO_HEAD_BIAS, gpu=_NO_HEAD_BIAS),
)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One row of the table of number formats. `methods`: its names in the config of a checkpoint."""

    name: str
    methods: tuple[str, ...]
    cpu: Cell
    gpu: Cell

    def on(self, device: str) -> Cell:
        """Return the support on a device."""
        return self.cpu if device == CPU else self.gpu


_NOT_AS_FLOATS = _refused(
    "a CPU takes fp8, mxfp4, gptq, awq and compressed-tensors back to floats; use one of these, or the bfloat16 one"
)
_BY_SGLANG = _unrun("SGLang's own kernels; its weights stay resident")

FORMATS: tuple[NumberFormat, ...] = (
    NumberFormat("bfloat16", ("bfloat16",), _WORKS, _UNRUN),
    NumberFormat("float32", ("float32",), _WORKS, _UNRUN),
    NumberFormat(
        "float16 (of a float32 checkpoint too, unless `--dtype` says otherwise)",
        ("float16",),
        _refused("the CPU's kernels take bfloat16 and float32; give --dtype bfloat16 or float32"),
        _UNRUN,
    ),
    NumberFormat(
        "bfloat16, experts read in 12 bits (`--cpu-weight-dtype lossless12`)",
        ("lossless12",),
        _WORKS,
        _refused("for the CPU's kernels"),
    ),
    NumberFormat(
        "int8, rounded when loaded (`--cpu-weight-dtype int8`)",
        ("int8",),
        _WORKS,
        _refused("for the CPU's kernels; see SGLang's --quantization"),
    ),
    NumberFormat(
        "fp8 checkpoint (a scale for a block, row or matrix)",
        ("fp8",),
        _works(
            "in bfloat16 its matrices of e4m3 stay in 8 bits, without loss (`--cpu-weight-dtype auto`), also streamed; "
            "else as floats"
        ),
        _BY_SGLANG,
    ),
    NumberFormat(
        "mxfp4 checkpoint",
        ("mxfp4",),
        _works(
            "in bfloat16 its experts stay in 4 bits, without loss (`--cpu-weight-dtype auto`), also streamed; else as "
            "floats"
        ),
        _BY_SGLANG,
    ),
    NumberFormat(
        "GPTQ, AWQ and compressed-tensors checkpoints",
        ("gptq", "awq", "compressed-tensors"),
        _works(
            "in bfloat16 integers stay in 4 or 8 bits, and fp8 in 8, without loss (`--cpu-weight-dtype auto`), most "
            "of them also streamed; else as floats"
        ),
        _BY_SGLANG,
    ),
    NumberFormat("other quantised checkpoints", ("bitsandbytes", "modelopt", "quark"), _NOT_AS_FLOATS, _BY_SGLANG),
)
_OTHER_QUANTISED = FORMATS[-1]


def family_named(architecture: str) -> ModelFamily | None:
    """Return the row of an architecture, or None if the table has none."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def has_adapter(architecture: str) -> bool:
    """Return whether the coroutine forward computes models of this architecture."""
    family = family_named(architecture)
    return family is not None and family.forward == COROUTINE


def format_of(method: str) -> NumberFormat:
    """Return the row of a number type or of a quantisation method, by its name in a config."""
    return next((row for row in FORMATS if method in row.methods), _OTHER_QUANTISED)


def forward_text(architecture: str, *, has_adapter: bool) -> str:
    """Return which forward pass computes a model's groups, as all logs and pages write it."""
    return COROUTINE if has_adapter else f"{SGLANG} (no adapter for {architecture})"
