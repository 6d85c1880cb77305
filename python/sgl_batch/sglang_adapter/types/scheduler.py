"""Owns the types of SGLang's scheduler and of its parts: pools, queues and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
    from sgl_batch.sglang_adapter.types.requests import Request


class RequestTable(Protocol):
    """The request table: the KV indices of each request's tokens (SGLang's ReqToTokenPool)."""

    size: int
    """Request slots, which are rows."""

    req_to_token: torch.Tensor
    """[size + 1, most tokens], int32: KV indices by request slot and position."""

    def available_size(self) -> int:
        """Return the number of free request slots."""

    def alloc(self, reqs: list[Request]) -> list[int] | None:
        """Give each request a request slot, in `req_pool_idx`; return None if too few are free."""

    def free(self, req: Request) -> None:
        """Free a request's request slot; its `req_pool_idx` becomes None."""


class PagePool(Protocol):
    """The KV of this process, by page. All our pools are page pools; SGLang also has pools without pages."""

    layer_num: int
    page_size: int
    """Tokens."""

    dtype: torch.dtype
    all_parts: tuple[torch.Tensor, ...]
    """The tensors of the pages of all layers, each [layers * num_pages, ...]."""

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a layer's pages, each [num_pages, ...]; layer 0 is this process's first layer."""

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """Let layers use other memory: `parts` of each layer as in page_parts, with pages from `first_page` on."""

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the KV at KV indices `src_loc` [tokens] to KV indices `tgt_loc` [tokens], in every layer."""


class KVPool(Protocol):
    """The KV of this process, by KV index. `read_kv` defines the form of a token's keys and values."""

    start_layer: int
    """The number of the first layer of this process."""

    def read_kv(self, layer_id: int, kv_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values at `kv_indices` [tokens]."""

    def write_kv(self, layer_id: int, kv_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values at `kv_indices` [tokens]."""


class PageAllocator(Protocol):
    """Owns which KV indices of the pool are free. It is mem_cache/page_allocator if the pool is one of ours."""

    size: int
    """Tokens that the pool can hold."""

    def get_kvcache(self) -> PagePool:
        """Return the pool."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate whole pages; return KV indices [need_size], int64, or None if too few are free."""

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of these KV indices [tokens]."""

    @property
    def first_staged(self) -> int:
        """The number of the first page after the pool's own pages."""

    def staging(self) -> AbstractContextManager[None]:
        """Inside, new KV indices are of pages after the pool's own."""

    def decoding_staged(self) -> AbstractContextManager[None]:
        """Inside, decode steps get KV indices of pages after the pool's own."""


class PrefixCache(Protocol):
    """SGLang's prefix cache (ChunkCache). It keeps nothing here, but SGLang's functions need it."""

    def cache_unfinished_req(self, req: Request, chunked: bool) -> None:
        """Make the part of a request that a prefill has computed its prefix."""


class GrammarManager(Protocol):
    """Requests that wait for their grammar."""

    grammar_queue: list[Request]

    def has_waiting_grammars(self) -> bool:
        """Return whether there are any."""

    def get_ready_grammar_requests(self) -> list[Request]:
        """Remove from the queue the requests whose grammar is compiled, and return them."""


class OutputStreamer(Protocol):
    """Sends answers to the detokenizer."""

    def stream_output(self, reqs: list[Request], return_logprob: bool) -> None:
        """Send the new output of these requests."""


class TokenRelay(Protocol):
    """The last tokens of decode batches, on the device (SGLang's FutureMap)."""

    def stash(self, future_indices: torch.Tensor, payload: object) -> None:
        """Keep them for request slots [B]."""


class ResultProcessor(Protocol):
    """Processes the results of passes (SGLang's SchedulerBatchResultProcessor, a frozen dataclass)."""

    enable_overlap: bool
    """Whether it skips rows whose requests have ended."""

    def _maybe_update_reasoning_tokens(self, req: Request, next_token_id: list[int]) -> None:
        """Count those generated tokens of a request that are reasoning."""


class Dispatcher(Protocol):
    """The handlers of each kind of message (SGLang's TypeBasedDispatcher)."""

    _mapping: dict[type, Callable[[object], object]]


class Poller(Protocol):
    """zmq's poller over the scheduler's sockets."""

    def poll(self, timeout: int) -> object:
        """Wait until a socket has a message, at most this many milliseconds."""


class IdleSleeper(Protocol):
    """Waits for input while there is nothing to do."""

    poller: Poller


class ModelConfig(Protocol):
    """The model's configuration. Sizes are numbers of elements."""

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
    """It exists with sleep_on_idle, which our defaults set."""
