"""A model that cannot be computed correctly here is refused by the fields of its config, with the reason."""

from __future__ import annotations

import pytest

from sgl_batch.config import from_mapping
from sgl_batch.core.model_refusals import check_without_adapter, refusal
from sgl_batch.core.supported_models import CPU, DEVICES, FAMILIES, GPU
from sgl_batch.errors import ConfigError

# Fields as in the models' own configs.
ON_ALL_DEVICES = [
    ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
    ("Qwen3NextForCausalLM", {"linear_num_value_heads": 32, "full_attention_interval": 4}, "linear_num_value_heads"),
    ("JambaForCausalLM", {"mamba_d_state": 16, "attn_layer_period": 8}, "mamba_d_state"),
    ("FalconH1ForCausalLM", {"mamba_d_ssm": 1024, "ssm_in_multiplier": 1.0}, "mamba_d_ssm"),
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"]}, "layers of mamba"),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": [1]}, "kv_lora_rank": 512}, "linear_attn_config"),
    ("MiniMaxText01ForCausalLM", {"attn_type_list": [0, 0, 1]}, "attn_type_list"),
    ("Lfm2ForCausalLM", {"conv_L_cache": 3}, "conv_L_cache"),
    ("JetNemotronForCausalLM", {"layer_types": ["jet", "attn", "swa"]}, "state from token to token"),
    ("DeepseekV32ForCausalLM", {"index_topk": 2048, "kv_lora_rank": 512}, "index_topk"),
    ("GlmMoeDsaForCausalLM", {"index_n_heads": 32, "index_topk": 2048}, "index_n_heads"),
    ("MiniMaxM3SparseForCausalLM", {"sparse_attention_config": {"use": True}}, "sparse_attention_config"),
    ("DeepseekV4ForCausalLM", {"compress_ratios": [4, 128]}, "compress_ratios"),
    ("Llama4ForCausalLM", {"attention_chunk_size": 8192}, "within chunks"),
    ("Llama4ForConditionalGeneration", {"text_config": {"attention_chunk_size": 8192}}, "images or sound"),
    ("Gemma3ForConditionalGeneration", {"vision_config": {"hidden_size": 8}}, "images or sound"),
    ("KimiVLForConditionalGeneration", {}, "images or sound"),
    ("Qwen2AudioForConditionalGeneration", {"audio_config": {"d_model": 8}}, "images or sound"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "it has an encoder"),
    ("LlamaForSequenceClassification", {}, "no text"),
    ("Qwen2ForRewardModel", {}, "no text"),
    ("MistralModel", {}, "no text"),
    ("LlamaForCausalLMEagle3", {}, "a draft"),
    ("Glm4MoeForCausalLMNextN", {}, "a draft"),
    ("SDARForCausalLM", {}, "diffusion"),
    ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256}, "latent"),
    ("Glm4MoeLiteForCausalLM", {"text_config": {"kv_lora_rank": 512}}, "latent"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
    ("DeciLMForCausalLM", {"block_configs": [{"attention": {}}]}, "block_configs"),
    ("MiMoV2FlashForCausalLM", {"sliding_window": 128}, "second pool"),
    ("BloomForCausalLM", {}, "ALiBi"),
    ("FalconForCausalLM", {"alibi": True}, "ALiBi"),
    ("TomorrowsForCausalLM", {"layer_types": ["full_attention", "retention"]}, "layers of retention"),
]
HEADS = {"hidden_size": 64, "num_attention_heads": 4}
ON_ALL_DEVICES += [
    (f"{name}ForCausalLM", {**HEADS, "head_dim": 32}, "32 channels (head_dim in its config), and SGLang's model gives")
    for name in ("Baichuan", "Cohere", "GraniteMoe", "Mixtral", "Olmo2", "Olmoe", "Qwen2Moe", "StableLm", "Starcoder2")
]
WINDOWED = {"sliding_window": 64, "max_position_embeddings": 4096}
HUNYUAN = {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2, "head_dim": 8}
READ = {"use_mixed_mlp_moe": False, "use_qk_norm": True}
ON_A_CPU = [
    ("Phi3ForCausalLM", WINDOWED, "only to the last 64 tokens"),
    ("Gemma3ForCausalLM", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, "--context-length 64"),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": 50.0}, "caps the logits"),
    ("Qwen3MoeForCausalLM", {"quantization_config": {"quant_method": "quark"}}, r"quantised by quark.*bfloat16"),
    ("Qwen3MoeForCausalLM", {"quantization_config": "int3"}, "quantised by int3, which is none of"),
    (
        "LlamaForCausalLM",
        {"compression_config": {"quant_method": "awq", "bits": 3}},
        r"quantised by awq of 3 bits, and 4 are read: a CPU takes",
    ),
    ("HunYuanMoEV1ForCausalLM", {**HUNYUAN, **READ, "moe_intermediate_size": [16, 16]}, "one number with --json-model"),
    ("OddForCausalLM", {"head_dim": 192, "v_head_dim": 128}, "128 channels"),
]
# Fields as transformers writes them.
DBRX = {"attn_config": {"clip_qkv": None, "kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 16, "moe_top_k": 1}}
UNREADABLE = [
    ("HunYuanMoEV1ForCausalLM", HUNYUAN, "lacks moe_intermediate_size, use_mixed_mlp_moe, use_qk_norm, which"),
    ("HunYuanDenseV1ForCausalLM", {"model_type": "hunyuan_v1_dense", "head_dim": 8}, "lacks use_qk_norm, which"),
    ("HYV3ForCausalLM", {"model_type": "hy_v3", "num_experts_per_tok": 2}, "lacks route_norm, which"),
    ("DbrxForCausalLM", {"ffn_config": {**DBRX["ffn_config"], "hidden_size": 8}}, "its ffn_config has hidden_size"),
    ("DbrxForCausalLM", {"attn_config": {**DBRX["attn_config"], "dtype": "bfloat16"}}, "its attn_config has dtype"),
]
READABLE = [
    (
        "HunYuanMoEV1ForCausalLM",
        {**HUNYUAN, **READ, "moe_intermediate_size": [16, 16]},
    ),
    ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}),
    ("HYV3ForCausalLM", {"route_norm": False}),
    ("DbrxForCausalLM", DBRX),
    ("DbrxForCausalLM", {"attn_config": None, "ffn_config": 3}),
]
RIGHT = [
    ("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Qwen2ForCausalLM", {**WINDOWED, "use_sliding_window": False}),
    ("Qwen3ForCausalLM", {**WINDOWED, "layer_types": ["full_attention"] * 2}),
    ("MistralForCausalLM", {"sliding_window": 4096, "max_position_embeddings": 4096}),
    ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512, "v_head_dim": 128, "head_dim": 64}),
    ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 1], "head_dim": 128}),
    ("GptOssForCausalLM", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}),
    ("GPT2LMHeadModel", {}),
    ("MixtralForCausalLM", {**HEADS, "head_dim": 16}),
    ("OlmoeForCausalLM", {**HEADS, "head_dim": None}),
    ("LlamaForCausalLM", {**HEADS, "head_dim": 32}),
    ("ChatGLMModel", {}),
    (
        "GarbledForCausalLM",
        {"sliding_window": "4k", "layer_types": 3, "attn_type_list": 1, "text_config": [], "v_head_dim": {}},
    ),
    ("CohereForCausalLM", {"layer_types": None, "alibi": False, "vision_config": None}),
]


def config(architecture, fields):
    return {"architectures": [architecture], **fields}


@pytest.mark.parametrize(("architecture", "fields", "words"), ON_ALL_DEVICES)
def test_a_model_that_no_device_computes_correctly_is_refused_before_the_device_is_known(architecture, fields, words):
    why = refusal(config(architecture, fields))
    assert why is not None
    assert words in why


@pytest.mark.parametrize(("architecture", "fields", "words"), ON_A_CPU)
def test_a_model_that_a_cpu_cannot_compute_is_refused_only_there(architecture, fields, words):
    assert refusal(config(architecture, fields)) is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refusal(config(architecture, fields), device=CPU))


@pytest.mark.parametrize(("architecture", "fields", "words"), UNREADABLE)
def test_a_config_that_sglang_s_model_cannot_read_is_refused_once_all_its_fields_are_known(architecture, fields, words):
    assert refusal(config(architecture, fields)) is None, "arguments may add fields to it"
    assert words in str(refusal(config(architecture, fields), device=GPU))


@pytest.mark.parametrize(("architecture", "fields"), READABLE)
def test_a_config_with_the_fields_that_sglang_s_model_reads_passes(architecture, fields):
    assert refusal(config(architecture, fields), device=GPU) is None


@pytest.mark.parametrize(("architecture", "fields"), RIGHT)
@pytest.mark.parametrize("device", [None, *DEVICES])
def test_a_plain_decoder_passes(architecture, fields, device):
    assert refusal(config(architecture, fields), device=device) is None


def test_a_window_that_sglang_ignores_is_refused_on_a_gpu_as_well_unless_sequences_are_shorter():
    assert "last 64 tokens" in str(refusal(config("Phi3ForCausalLM", WINDOWED), device=GPU))
    assert refusal(config("Gemma3ForCausalLM", WINDOWED), device=GPU) is None
    for device in DEVICES:
        assert refusal(config("Phi3ForCausalLM", WINDOWED), device=device, context=64) is None


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", {"a": 1}])
def test_a_config_without_a_list_of_architectures_is_left_to_what_checks_its_form(named):
    assert refusal({"architectures": named}, device=CPU) is None


@pytest.mark.parametrize("name", [name for row in FAMILIES for name in row.architectures])
def test_a_family_of_the_table_is_not_refused_by_its_name(name):
    assert refusal(config(name, {})) is None


@pytest.mark.parametrize(
    ("ours", "num_ranks", "words"),
    [
        ({"kv_store_bytes": "1M", "kv_store_mode": "inclusive"}, 1, "kv_store_mode is 'inclusive', .* by layer"),
        ({"kv_store_bytes": "1M", "decode_kv": "streamed"}, 1, "decode_kv is 'streamed', .* leave out --decode-kv"),
        ({"mix_prefill": 64}, 1, "mix_prefill is 64, .* by themselves"),
        ({"on_yield": "a:b"}, 1, "on_yield is 'a:b', .* no sequence yields"),
        ({}, 2, "dp_size is 2, .* leave out --tp, --dp and --ep"),
    ],
)
def test_what_sglang_s_own_forward_does_not_do_is_refused_for_a_model_without_an_adapter(ours, num_ranks, words):
    for fine in ({}, {"kv_store_bytes": "1M", "kv_store_mode": "exclusive", "decode_kv": "resident"}):
        check_without_adapter("OtherForCausalLM", from_mapping(fine), num_ranks=1)
    with pytest.raises(ConfigError, match=words):
        check_without_adapter("OtherForCausalLM", from_mapping(ours), num_ranks=num_ranks)
