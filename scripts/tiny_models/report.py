"""Owns the measurements of a finished checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from .routing import RouterProbe
from .training import token_loss

QUESTIONS = (
    "What does os.path.join do?",
    "What is collections.OrderedDict.popitem?",
    "How do I use a thread?",
    "A baker makes 24 rolls each morning and sells 17 of them. How many rolls are left after 5 days?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMeasures:
    """Results on held-out text: loss in nats per token, the gap between the two best logits, expert shares."""

    loss: float
    logit_gap: float
    near_tie_share: float
    expert_shares_by_layer: list[list[float]]


def measure_held_out(model: PreTrainedModel, samples: list[list[int]], row_length: int = 512) -> HeldOutMeasures:
    """Run the held-out samples, one after the other in rows of `row_length` tokens, at most 32 rows."""
    stream = [token for sample in samples for token in sample]
    num_rows = min(32, len(stream) // row_length)
    rows_BL = torch.tensor(stream[: num_rows * row_length]).view(num_rows, row_length)
    probe = RouterProbe(model)
    with torch.no_grad():
        logits_BLV = model(input_ids=rows_BL, use_cache=False).logits.float()
    best_BL2 = logits_BLV.topk(2, dim=-1).values
    gap_BL = best_BL2[..., 0] - best_BL2[..., 1]
    return HeldOutMeasures(
        loss=token_loss(logits_BLV, rows_BL).item(),
        logit_gap=gap_BL.mean().item(),
        near_tie_share=(gap_BL < 0.05).float().mean().item(),
        expert_shares_by_layer=[probe.expert_shares(layer).tolist() for layer in range(len(probe.logits_LTE))],
    )


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str, max_tokens: int = 200
) -> tuple[str, bool]:
    """Return the greedy answer to one question, and whether it ended with an end token."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)[0]
    generated = output[prompt["input_ids"].shape[1] :]
    ended = bool(generated[-1] == tokenizer.eos_token_id)
    return str(tokenizer.decode(generated, skip_special_tokens=True)), ended


def print_report(path: Path, held_out: list[list[int]], train_loss: float) -> None:
    """Load the checkpoint as a user does, in bf16, and print the figures of test/models/README.md."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    measures = measure_held_out(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), held_out)
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": num_bytes,
        "train_loss": round(train_loss, 3),
        "held_out_loss": round(measures.loss, 3),
        "logit_gap": round(measures.logit_gap, 3),
        "near_tie_share": round(measures.near_tie_share, 4),
    }
    print(json.dumps({str(path.name): facts}, indent=1))
    for layer, shares in enumerate(measures.expert_shares_by_layer):
        even = 1 / len(shares)
        print(f"expert layer {layer}: expert shares min {min(shares):.3f} max {max(shares):.3f} even {even:.3f}")
    for question in QUESTIONS:
        text, ended = answer(model, tokenizer, question)
        print(f"\n> {question}\n{text}\n[{'ended by itself' if ended else 'cut at the limit'}]")
