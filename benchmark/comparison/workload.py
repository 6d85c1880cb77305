"""Owns the workload of every engine: prompts as token ids, and exact output lengths."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError

DEFAULT_OUTPUT_LEN = 32

# Tokenizers have special tokens at the ends of the vocabulary; random prompts avoid the low end.
_FIRST_RANDOM_ID = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts as token ids and, for each, how many tokens to generate.

    `scores_prompts`: each token of a prompt but the first is answered with its log probability, too.
    """

    prompts: list[list[int]]
    output_lens: list[int]
    description: str
    scores_prompts: bool = False

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.output_lens), "one output length a prompt"

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


# Qwen3-MoE's config fields, and the fields that other families have instead.
_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_key_value_heads": ("num_key_value_heads", "num_attention_heads"),
}


def model_config(model: Path) -> dict[str, Any]:
    """Read the checkpoint's config.json, and give a MoE model's sizes Qwen3-MoE's names too.

    Raises ConfigError where there is none.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model {model} is not a checkpoint directory: it has no config.json; "
            "`--make-model DIR` writes a random one"
        )
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return _named_alike(config.get("text_config", config))


def _named_alike(config: dict[str, Any]) -> dict[str, Any]:
    named = dict(config)
    for name, theirs in _NAMES.items():
        found = next((config[one] for one in theirs if config.get(one) is not None), None)
        if found is not None and (name == "num_experts" or "num_experts" in named):
            named[name] = found
    if "num_experts" in named and config.get("head_dim") is None and "num_attention_heads" in config:
        named["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return named


def check_fits(workload: Workload, config: dict[str, Any]) -> None:
    """Raise ConfigError for a prompt that, with its output, is longer than the model's context."""
    context = config.get("max_position_embeddings")
    for number, (prompt, output) in enumerate(zip(workload.prompts, workload.output_lens, strict=True), 1):
        if context is not None and len(prompt) + output > context:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and {output} to generate, more than the model's context "
                f"of {context}; lower --input-len or --output-len"
            )


def random_workload(
    *, num_prompts: int, input_len: int, spread: int, output_len: int, vocabulary: int, seed: int
) -> Workload:
    """Make prompts of uniform random tokens, with lengths uniform in [input_len - spread, input_len + spread]."""
    for flag, value in (("--num-prompts", num_prompts), ("--input-len", input_len), ("--output-len", output_len)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}; it must be at least 1")
    if not 0 <= spread < input_len:
        raise ConfigError(f"--input-len-spread is {spread}; it must be at least 0 and below --input-len ({input_len})")
    generator = random.Random(seed)
    first = _FIRST_RANDOM_ID if vocabulary > 2 * _FIRST_RANDOM_ID else 0
    lengths = [generator.randint(input_len - spread, input_len + spread) for _ in range(num_prompts)]
    prompts = [[generator.randrange(first, vocabulary) for _ in range(length)] for length in lengths]
    width = f"{input_len}" if spread == 0 else f"{input_len - spread} to {input_len + spread}"
    return Workload(
        prompts=prompts,
        output_lens=[output_len] * num_prompts,
        description=f"{num_prompts} random prompts of {width} tokens, {output_len} output tokens each (seed {seed})",
    )


def jsonl_workload(path: Path, model: Path, *, chat: bool, num_prompts: int | None, output_len: int | None) -> Workload:
    """Read the prompts of OpenAI batch request lines, tokenized once with the model's tokenizer.

    With `chat` messages go through the model's chat template; without, their texts are joined by line breaks.
    """
    bodies = _read_bodies(path, num_prompts)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [_prompt_ids(body, tokenizer, chat=chat) for body in bodies]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ConfigError(f"{path}, request {number}: its prompt has no tokens")
    lens = [output_len or _output_len(body, path, number) for number, body in enumerate(bodies, 1)]
    form = "through the chat template" if chat else "as plain text"
    return Workload(
        prompts=prompts,
        output_lens=lens,
        description=f"{len(prompts)} prompts of {path.name} {form}, {min(lens)} to {max(lens)} output tokens each",
    )


def _read_bodies(path: Path, num_prompts: int | None) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"--jsonl {path} is not a file")
    bodies: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if num_prompts is not None and len(bodies) == num_prompts:
                break
            if line.strip():
                bodies.append(_body(line, f"{path}, line {number}"))
    if not bodies:
        raise ConfigError(f"--jsonl {path} holds no request")
    return bodies


def _body(line: str, where: str) -> dict[str, Any]:
    try:
        body = json.loads(line).get("body")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{where} is no JSON object: {error}") from error
    if not isinstance(body, dict) or not (body.get("prompt") or body.get("messages")):
        raise ConfigError(f"{where} is no OpenAI batch request: it has no body with a prompt or messages")
    return body


def _prompt_ids(body: dict[str, Any], tokenizer: Any, *, chat: bool) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return [int(token) for token in prompt]
    messages = body.get("messages") or [{"role": "user", "content": prompt}]
    if chat:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer("\n".join(str(message["content"]) for message in messages))["input_ids"])


def _output_len(body: dict[str, Any], path: Path, number: int) -> int:
    wanted = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_OUTPUT_LEN
    if not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"{path}, request {number}: max_tokens is {wanted!r}; it must be at least 1")
    return wanted
