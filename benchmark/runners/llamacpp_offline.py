"""Owns starting and calling llama.cpp: sequences decoded together through its batch interface, on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

# A sequence's own part of the KV cache grows in such steps.
_CONTEXT_STEP = 256
# ggml's type of KV where an engine is asked for float32; else its own choice, float16.
_FLOAT32 = 0


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One prompt on its way: what is left to compute of it, and its output so far."""

    number: int
    prompt: list[int]
    output_len: int
    computed: int = 0
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """A token of a batch: its sequence's slot, its position, and whether its logits are wanted."""

    slot: int
    token: int
    position: int
    wanted: bool


class Schedule:
    """Decides what each batch holds: continuous batching, prompts first.

    A sequence has a slot from its first prompt token to its last output token. While prompts wait and slots are free,
    a batch is one of prompt tokens, a long prompt in parts; else it has one token of each sequence in a slot.
    """

    def __init__(self, prompts: list[list[int]], output_lens: list[int], slots: int, batch_tokens: int) -> None:
        self._waiting = deque(
            Sequence(number=number, prompt=prompt, output_len=count)
            for number, (prompt, count) in enumerate(zip(prompts, output_lens, strict=True))
        )
        self._free = deque(range(slots))
        self._batch_tokens = batch_tokens
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.running: dict[int, Sequence] = {}

    def next_batch(self) -> list[Row]:
        """Return the rows of the next batch; none when every output is complete."""
        while self._waiting and self._free:
            self.running[self._free.popleft()] = self._waiting.popleft()
        return self._prompt_rows() or self._decode_rows()

    def _prompt_rows(self) -> list[Row]:
        rows: list[Row] = []
        for slot, one in self.running.items():
            part = one.prompt[one.computed :][: self._batch_tokens - len(rows)]
            last = len(one.prompt) - 1
            rows += [Row(slot, token, at, wanted=at == last) for at, token in enumerate(part, one.computed)]
        return rows

    def _decode_rows(self) -> list[Row]:
        rows = [Row(slot, one.output[-1], one.computed, wanted=True) for slot, one in self.running.items()]
        return rows[: self._batch_tokens]

    def take(self, rows: list[Row], tokens: list[int]) -> list[int]:
        """Note that a batch was computed, with a new token for each row that wanted one; return slots that are over."""
        chosen = iter(tokens)
        over = []
        for row in rows:
            one = self.running[row.slot]
            one.computed = row.position + 1
            if row.wanted:
                one.output.append(next(chosen))
            if len(one.output) == one.output_len:
                self.outputs[one.number] = one.output
                over.append(row.slot)
        for slot in over:
            del self.running[slot]
            self._free.append(slot)
        return over


class LlamaCppRunner:
    """A llama.cpp context, which generates exact numbers of greedy tokens for as many sequences as it has slots."""

    def __init__(self, model: Any, context: Any, chosen: dict[str, Any]) -> None:
        import llama_cpp

        self._library, self._context, self._chosen = llama_cpp, context, chosen
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._slots = llama_cpp.llama_n_seq_max(context)
        self._batch_tokens = llama_cpp.llama_n_batch(context)
        self._batch = llama_cpp.llama_batch_init(self._batch_tokens, 0, 1)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        schedule = Schedule(prompts, output_lens, self._slots, self._batch_tokens)
        memory = self._library.llama_get_memory(self._context)
        while rows := schedule.next_batch():
            for slot in schedule.take(rows, self._greedy(rows)):
                self._library.llama_memory_seq_rm(memory, slot, -1, -1)
        return schedule.outputs

    def _greedy(self, rows: list[Row]) -> list[int]:
        """Compute a batch; return the likeliest token after each row that wants one, in order."""
        import numpy

        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index] = row.token, row.position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row.slot
            batch.logits[index] = row.wanted
        code = self._library.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for a batch of {len(rows)} tokens")
        wanted = sum(row.wanted for row in rows)
        if not wanted:
            return []
        # They lie one after the other, in the order of the batch.
        logits = self._library.llama_get_logits(self._context)
        found = numpy.ctypeslib.as_array(logits, (wanted, self._vocabulary))
        return [int(token) for token in found.argmax(axis=1)]

    def details(self) -> dict[str, Any]:
        """Return what was chosen for it: sequences at once, tokens of a batch, threads, and its own description."""
        return self._chosen


def start(spec: dict[str, Any]) -> LlamaCppRunner:
    """Start it on the file that `converted` among the arguments names.

    The other arguments are fields of its model and context parameters. It takes all prompts at once, up to the number
    of sequences that it was built for (256), with a KV cache in which each has room for the longest.
    """
    import llama_cpp

    arguments = dict(spec["arguments"])
    converted = arguments.pop("converted", None)
    if converted is None:
        raise ValueError(
            "llamacpp needs the model in its own format: benchmark/peers/llamacpp.sh ENVIRONMENT MODEL GGUF makes it, "
            "and --engine-arg llamacpp:converted=GGUF names it"
        )
    of_model, of_context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    for name, value in {**context_arguments(spec, llama_cpp.llama_max_parallel_sequences()), **arguments}.items():
        owner = next((one for one in (of_context, of_model) if hasattr(one, name)), None)
        if owner is None:
            raise ValueError(f"llamacpp has no parameter {name}; llama_context_params and llama_model_params have them")
        setattr(owner, name, value)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(converted).encode(), of_model)
    if not model:
        raise ValueError(f"llama.cpp cannot load {converted}; the log above says why")
    context = llama_cpp.llama_init_from_model(model, of_context)
    if not context:
        raise ValueError(f"llama.cpp cannot make a context for {converted}; the log above says why")
    return LlamaCppRunner(model, context, _chosen(model, of_context))


def context_arguments(spec: dict[str, Any], most_sequences: int) -> dict[str, Any]:
    """Return our choice of context parameters for a workload: one slot for each prompt, up to `most_sequences`.

    Tokens of a batch (2,048) and of a pass (512) are its own choice: passes of 2,048 take longer here.
    """
    slots = min(len(spec["prompts"]), most_sequences)
    longest = max(len(prompt) + count for prompt, count in zip(spec["prompts"], spec["output_lens"], strict=True))
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {
        "n_seq_max": slots,
        "n_ctx": slots * -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP,
        "n_threads": threads,
        "n_threads_batch": threads,
        **({"type_k": _FLOAT32, "type_v": _FLOAT32} if spec["dtype"] == "float32" else {}),
    }


def _chosen(model: Any, of_context: Any) -> dict[str, Any]:
    import llama_cpp

    text = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(model, text, len(text))
    names = ("n_seq_max", "n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "kv_unified")
    return {
        "model": text.value.decode(),
        "system": llama_cpp.llama_print_system_info().decode(),
        **{name: getattr(of_context, name) for name in names},
    }
