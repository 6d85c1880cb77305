"""The table of request fields: how each field of SGLang's requests is treated, and each of OpenAI's that SGLang lacks.

It does not decide which values a computed field may have. A field that an upgrade of SGLang adds is missing here, and a
test names it. A name means the same in every class that has it.
"""

from __future__ import annotations

from typing import Final

# The answer depends on these, as their names say.
COMPUTED: Final = frozenset(
    (
        # the prompt
        "messages prompt text input_ids tools tool_choice continue_final_message chat_template_kwargs echo "
        # sampling
        "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias seed "
        "sampling_seed sampling_params n "
        # the end
        "max_tokens max_completion_tokens max_new_tokens min_tokens min_new_tokens stop stop_token_ids stop_regex "
        "ignore_eos no_stop_trim "
        # grammars
        "response_format json_schema regex ebnf structural_tag "
        # the form of the answer
        "stream stream_interval skip_special_tokens spaces_between_special_tokens logprobs top_logprobs return_logprob "
        "logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids "
        "return_routed_experts routed_experts_start_len return_hidden_states"
    ).split()
)

# These may be given. They change no token, or are checked elsewhere.
PASSED: Final = {
    "model": "checked against the served names in request lines",
    "stream_options": "usage in a stream",
    "user": "a label",
    "store": "a label of OpenAI's service",
    "metadata": "a label of OpenAI's service",
    "service_tier": "a choice of OpenAI's service",
    "prompt_cache_key": "a hint to OpenAI's service",
    "prompt_cache_retention": "a hint to OpenAI's service",
    "safety_identifier": "a label of OpenAI's service",
    "prediction": "a hint that may only save time",
    "verbosity": "a hint to OpenAI's models",
    "parallel_tool_calls": "a limit for the parser of tool calls",
    "reasoning_effort": "an argument of the chat template, which may take no notice",
    "require_reasoning": "whether a grammar begins after the reasoning",
    "separate_reasoning": "where the reasoning stands in the answer",
    "stream_reasoning": "where the reasoning stands in a stream",
    "return_cached_tokens_details": "counts of cached tokens",
    "return_meta_info": "SGLang's own counts of an answer",
    "lora_path": "refused by SGLang unless LoRA is enabled",
    "custom_logit_processor": "refused by SGLang unless it is enabled, and in request lines",
    "custom_params": "arguments of the custom logit processor",
    "routed_dp_rank": "refused by SGLang where there is no such rank",
    "data_parallel_rank": "SGLang's former name of routed_dp_rank",
    "session_id": "a label; sessions proper are session_params",
    "session_params": "refused by SGLang unless the session is open",
    "rid": "a name for aborting",
    "priority": "a hint about the order",
    "extra_key": "keeps prefixes apart, which changes no token",
    "cache_salt": "keeps prefixes apart, which changes no token",
    "routing_key": "a hint about the order",
    "conversation_id": "a label",
    "custom_labels": "labels of metrics",
    "log_metrics": "whether metrics count the request",
    "no_logs": "whether logs name the request",
    "background": "set by SGLang's own /v1/responses",
    "return_bytes": "set by SGLang's own endpoints of images",
    "external_trace_header": "a trace's context",
    "received_time": "a time for metrics",
}

_PREFILL_APART = "prefill and decode run in one engine here: leave it out"
_INTERNAL = "SGLang sets it itself, from other fields: leave it out"
_NOT_MADE = "the engine does not make it: leave it out"
_OPENAI_ALONE = "only OpenAI's service does this: leave it out"

# Fields that would be ignored or computed wrongly. A value that asks for nothing (null, the default, an empty list)
# passes.
REFUSED: Final = {
    "input_embeds": "the engine computes from tokens alone: give text or input_ids",
    "positional_embed_overrides": "the engine computes from tokens alone: leave it out",
    "best_of": "choices are not ranked; ask with n for as many as you want",
    "suffix": "nothing is inserted before a text: leave it out",
    "task": "only the prompts of DeepSeek-V4 have it: say in the messages what to do",
    "audio": _OPENAI_ALONE,
    "web_search_options": _OPENAI_ALONE,
    "functions": "give tools in its place",
    "function_call": "give tool_choice in its place",
    "bootstrap_host": _PREFILL_APART,
    "bootstrap_port": _PREFILL_APART,
    "bootstrap_room": _PREFILL_APART,
    "bootstrap_pair_key": _PREFILL_APART,
    "decode_tp_size": _PREFILL_APART,
    "disagg_prefill_dp_rank": _PREFILL_APART,
    "http_worker_ipc": _INTERNAL,
    "lora_id": "SGLang sets it itself: give lora_path",
    "need_wait_for_mm_inputs": _INTERNAL,
    "num_items_assigned": _INTERNAL,
    "mm_data_mooncake": _INTERNAL,
    "encoder_urls": _INTERNAL,
    "multi_item_delimiter_indices": _INTERNAL,
    "stop_strs": "SGLang sets it itself: give stop",
    "stop_regex_strs": "SGLang sets it itself: give stop_regex",
    "stop_str_max_len": _INTERNAL,
    "stop_regex_max_len": _INTERNAL,
    "is_normalized": _INTERNAL,
    "return_sampling_mask": _NOT_MADE,
    "return_indexer_topk": _NOT_MADE,
    "return_entropy": _NOT_MADE,
}

_NO_MEDIA = "the model that is served reads text alone: leave it out"

# Refused for a model that reads text alone, and passed to a model that reads more.
MEDIA: Final = {
    "image_data": _NO_MEDIA,
    "video_data": _NO_MEDIA,
    "audio_data": _NO_MEDIA,
    "modalities": _NO_MEDIA,
    "mm_hashes": _NO_MEDIA,
    "use_audio_in_video": _NO_MEDIA,
    "images_config": _NO_MEDIA,
    "max_dynamic_patch": _NO_MEDIA,
    "min_dynamic_patch": _NO_MEDIA,
    "image_max_dynamic_patch": _NO_MEDIA,
    "video_max_dynamic_patch": _NO_MEDIA,
}
MEDIA_PARTS: Final = ("image_url", "video_url", "audio_url", "input_audio", "file")

_STRUCTURED = "give response_format, json_schema, regex or ebnf in its place"
_TEMPLATE = "prompts follow the chat template of the model, or that of --chat-template: leave it out"

# Fields of vLLM, and of OpenAI's Responses API, that change an answer and would be ignored here. Neither SGLang nor
# OpenAI's chats and completions have them.
OTHER_ENGINES: Final = {
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "use_beam_search": "answers are sampled: leave it out",
    "length_penalty": "answers are sampled, not searched for: leave it out",
    "include_stop_str_in_output": "give no_stop_trim in its place",
    "allowed_token_ids": "give a regex or another grammar in its place",
    "bad_words": "give logit_bias, or a grammar, in its place",
    "prompt_logprobs": "ask /generate, with logprob_start_len",
    "truncate_prompt_tokens": "prompts are answered whole: shorten them before",
    "max_output_tokens": "give max_completion_tokens or max_tokens in its place",
    "chat_template": _TEMPLATE,
    "documents": "give what the template takes in chat_template_kwargs",
}

# Values of refused fields that ask for something that is computed anyway.
ALLOWED: Final[dict[str, tuple[object, ...]]] = {"best_of": (1,), "modalities": (["text"],), "function_call": ("none",)}
