"""Owns the tokenizer and the chat template of all tiny models."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Sample

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MAX_LENGTH = 4096

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('A message must have the role system, user or assistant, not ' ~ message.role) }}
{%- endif %}
{{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `vocab_size` entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer under the class name that transformers 4 and 5 both know."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    entries = json.loads(path.read_text())
    entries.pop("backend", None)
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")


def encode_samples(tokenizer: PreTrainedTokenizerFast, samples: list[Sample]) -> list[list[int]]:
    """Return the token ids of each sample: a document between BOS and END, a conversation in the chat template."""
    texts = [
        str(tokenizer.apply_chat_template(list(sample.messages), tokenize=False))
        if sample.messages
        else f"{BOS}{sample.document}{END}"
        for sample in samples
    ]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
