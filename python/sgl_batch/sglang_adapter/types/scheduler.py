"""What we use of SGLang's scheduler and of the parts that it holds: pools, queues, and ways out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
    from sgl_batch.sglang_adapter.types.requests import Request


class RequestTable(Protocol):
    """Which slots each request's KV has (SGLang's ReqToTokenPool)."""

    size: int
    """Rows, each for a request."""

    req_to_token: torch.Tensor
    """[size + 1, most tokens], int32: slots by row and position."""

    def available_size(self) -> int:
        """Rows that are free."""

    def alloc(self, reqs: list[Request]) -> list[int] | None:
        """Give each a row, in `req_pool_idx`; None where too few are free."""

    def free(self, req: Request) -> None:
        """Take a request's row; its `req_pool_idx` is None then."""


class PagePool(Protocol):
    """The KV of this process, by page. Every pool of ours is one; SGLang has others, which have no pages."""

    layer_num: int
    page_size: int
    """Tokens."""

    dtype: torch.dtype
    all_parts: tuple[torch.Tensor, ...]
    """What the pages of all layers consist of, each [layers * num_pages, ...]."""

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What a layer's pages consist of, each [num_pages, ...]; layers are counted from this process's first."""

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """Let layers read and write other memory: `parts` of each as in page_parts, with pages from `first_page` on."""

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the KV in slots `src_loc` [tokens] to slots `tgt_loc` [tokens], in every layer."""


class KVPool(Protocol):
    """The KV of this process, by KV index. Keys and values of a token have the form that the pool's reading gives."""

    start_layer: int
    """The number of the first layer of this process."""

    def read_kv(self, layer_id: int, kv_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values at `kv_indices` [tokens]."""

    def write_kv(self, layer_id: int, kv_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values at `kv_indices` [tokens]."""


class PageAllocator(Protocol):
    """Which slots of the pool are free. Ours (mem_cache/page_allocator), wherever the pool is one of ours."""

    size: int
    """Tokens that the pool can hold."""

    def get_kvcache(self) -> PagePool:
        """The pool."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots [need_size], int64, of whole pages; None where too few are free."""

    def free(self, free_index: torch.Tensor) -> None:
        """Give back the pages of these slots [tokens]."""

    @property
    def first_staged(self) -> int:
        """The number of the first page behind the pool's own."""

    def staging(self) -> AbstractContextManager[None]:
        """Inside, new slots are those of pages behind the pool's own."""

    def decoding_staged(self) -> AbstractContextManager[None]:
        """Inside, decode steps get slots of pages behind the pool's own."""


class PrefixCache(Protocol):
    """SGLang's cache of prefixes, which keeps none here (ChunkCache): SGLang's functions ask for it."""

    def cache_unfinished_req(self, req: Request, chunked: bool) -> None:
        """Let a request of which a prefill has computed a part have that as its prefix."""


class GrammarManager(Protocol):
    """Requests that wait for their grammar."""

    grammar_queue: list[Request]

    def has_waiting_grammars(self) -> bool:
        """Whether there are any."""

    def get_ready_grammar_requests(self) -> list[Request]:
        """Those whose grammar is there now; they are in the queue no longer."""


class OutputStreamer(Protocol):
    """The way of answers to the detokenizer."""

    def stream_output(self, reqs: list[Request], return_logprob: bool) -> None:
        """Send what is new of these requests."""


class TokenRelay(Protocol):
    """The last tokens of decode batches, on the device (SGLang's FutureMap)."""

    def stash(self, future_indices: torch.Tensor, payload: object) -> None:
        """Keep them for rows of the table of slots [B]."""


class ResultProcessor(Protocol):
    """What takes in the results of passes (SGLang's SchedulerBatchResultProcessor, a frozen dataclass)."""

    enable_overlap: bool
    """Whether it passes over rows whose requests have ended."""

    def _maybe_update_reasoning_tokens(self, req: Request, next_token_id: list[int]) -> None:
        """Count tokens that a request has generated as reasoning, where they are."""


class Dispatcher(Protocol):
    """What handles each kind of message (SGLang's TypeBasedDispatcher)."""

    _mapping: dict[type, Callable[[object], object]]


class Poller(Protocol):
    """zmq's, over the scheduler's sockets."""

    def poll(self, timeout: int) -> object:
        """Wait until one has a message, at most so many milliseconds."""


class IdleSleeper(Protocol):
    """What waits for input while there is nothing to do."""

    poller: Poller


class ModelConfig(Protocol):
    """The model as its configuration has it. Sizes are numbers of elements."""

    context_len: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    hf_text_config: object
    """The checkpoint's config.json; its fields differ from family to family."""

    hf_eos_token_id: set[int] | None


class SGLangScheduler(Protocol):
    """SGLang's scheduler, as far as our managers and the adapter use it."""

    device: str
    page_size: int
    """Tokens."""

    tokenizer: object
    model_config: ModelConfig
    spec_algorithm: object
    waiting_queue: list[Request]
    running_batch: ScheduleBatch
    req_to_token_pool: RequestTable
    token_to_kv_pool_allocator: PageAllocator
    tree_cache: PrefixCache

    future_map: TokenRelay
    grammar_manager: GrammarManager
    output_streamer: OutputStreamer
    batch_result_processor: ResultProcessor
    _request_dispatcher: Dispatcher
    idle_sleeper: IdleSleeper
    """There with sleep_on_idle, which our defaults set."""
