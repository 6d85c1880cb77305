"""Owns the transport over a process group of torch.distributed (gloo on a CPU, NCCL on GPUs).

Many small tensors (a page of one layer is tens of KB) are packed into chunks. Each transfer has two buffers: one is
packed or unpacked while the other is on the wire. Each transfer has a thread of its own, because gloo cannot be asked
whether an operation has ended, and gloo's timeout closes the connections to every rank.

Nothing here has run yet over NCCL, or with tensors on a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from sgl_batch.distributed.rank_errors import PeerTimeout, TransferError
from sgl_batch.distributed.transport import ignore

# Both ranks must cut a list of tensors into the same chunks, so this is a constant and no setting.
CHUNK_BYTES = 8 << 20
# Each tensor of a chunk begins at a multiple of this, which suits every type.
_ALIGNMENT = 16


def chunks_of(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Cut a list of tensors into chunks of (offset in bytes, tensor). A tensor larger than a chunk has its own."""
    chunk: list[tuple[int, torch.Tensor]] = []
    end = 0
    for tensor in tensors:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if chunk and begin + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, begin = [], 0
        chunk.append((begin, tensor))
        end = begin + tensor.nbytes
    if chunk:
        yield chunk


def _chunk_bytes(chunk: list[tuple[int, torch.Tensor]]) -> int:
    offset, last = chunk[-1]
    return offset + last.nbytes


class GroupTransfer:
    """One transfer and its thread (see transport.Transfer for the contract)."""

    def __init__(
        self,
        operation: Callable[[torch.Tensor], dist.Work],
        tensors: Sequence[torch.Tensor],
        *,
        sends: bool,
        peer: int,
        on_done: Callable[[], None],
        through_host: bool,
    ) -> None:
        self._operation, self._sends, self._peer, self._on_done = operation, sends, peer, on_done
        self._chunks = list(chunks_of(tensors))
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._wire = torch.device("cpu") if through_host else self._device
        self._total_bytes = sum(tensor.nbytes for tensor in tensors)
        self.moved_bytes = 0
        self._error: RuntimeError | None = None
        self._complete = self.abandoned = False
        self._ended = threading.Event()
        self._holds_tensors = threading.Lock()
        # The transfer begins after the work that the caller has enqueued for these tensors on its stream.
        self._ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        way = "to" if sends else "from"
        self.what = f"{self._total_bytes} bytes {way} rank {peer}"
        threading.Thread(target=self._run, name=f"transfer {way} rank {peer}", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        if not self._ended.wait(timeout_s):
            raise PeerTimeout([self._peer], awaiting=f"{self.what} ({self.moved_bytes} moved)", seconds=timeout_s)
        if not self._complete:
            reason = str(self._error).strip().splitlines()[0] if self._error else "see its thread's traceback"
            raise TransferError(
                self._peer, f"rank {self._peer}: {self.what} failed after {self.moved_bytes}: {reason}"
            ) from self._error

    def abandon(self) -> None:
        with self._holds_tensors:
            self.abandoned = True

    def _run(self) -> None:
        try:
            if self._ready is None:
                self._move()
            else:
                with torch.cuda.device(self._device):
                    torch.cuda.current_stream().wait_event(self._ready)
                    self._move()
            self._complete = True
        except RuntimeError as error:  # torch raises this for a closed connection
            self._error = error
        finally:
            self._ended.set()
            self._on_done()

    def _move(self) -> None:
        """Move all chunks, with up to two on the wire. An abandoned transfer goes on to its end without its tensors."""
        size = max(map(_chunk_bytes, self._chunks), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._wire) for _ in range(min(2, len(self._chunks)))]
        on_wire: deque[tuple[int, dist.Work]] = deque()
        for index in range(len(self._chunks)):
            if len(on_wire) == 2:
                self._settle(buffers, *on_wire.popleft())
            buffer = buffers[index % 2]
            if self._sends:
                self._copy(index, buffer)
            on_wire.append((index, self._operation(buffer[: _chunk_bytes(self._chunks[index])])))
        while on_wire:
            self._settle(buffers, *on_wire.popleft())

    def _settle(self, buffers: list[torch.Tensor], index: int, work: dist.Work) -> None:
        work.wait()
        if not self._sends:
            self._copy(index, buffers[index % 2])
        if self._ready is not None:
            torch.cuda.current_stream().synchronize()  # NCCL's wait() blocks the stream, not this thread
        self.moved_bytes += sum(tensor.nbytes for _, tensor in self._chunks[index])

    def _copy(self, index: int, buffer: torch.Tensor) -> None:
        with self._holds_tensors:
            if self.abandoned:
                return
            for offset, tensor in self._chunks[index]:
                packed = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                if self._sends:
                    packed.copy_(tensor)
                else:
                    tensor.copy_(packed)


class GroupTransport:
    """A `Transport` over `group`, which nothing else may use (see transport.py for the contract).

    `ranks` are the numbers of the peers here, in the order of the group's own ranks. `through_host`: chunks travel in
    host memory wherever the tensors lie, as gloo requires. The group's timeout is gloo's limit for each chunk. When it
    passes, gloo closes the connections to all ranks: it must be longer than any wait.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], *, through_host: bool = True) -> None:
        assert group.size() == len(ranks), f"{len(ranks)} ranks named for a group of {group.size()}"
        self._group, self._through_host = group, through_host
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._begun: dict[int, list[GroupTransfer]] = {}

    def send(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> GroupTransfer:
        index = self._index_of(peer)

        def operation(buffer: torch.Tensor) -> dist.Work:
            return self._group.send([buffer], index, tag)

        return self._begin(operation, tensors, sends=True, peer=peer, on_done=on_done)

    def recv(
        self, into: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> GroupTransfer:
        index = self._index_of(peer)

        def operation(buffer: torch.Tensor) -> dist.Work:
            return self._group.recv([buffer], index, tag)

        return self._begin(operation, into, sends=False, peer=peer, on_done=on_done)

    def _index_of(self, peer: int) -> int:
        assert peer in self._index, f"rank {peer} is not in the transport's group of ranks {sorted(self._index)}"
        return self._index[peer]

    def _begin(
        self,
        operation: Callable[[torch.Tensor], dist.Work],
        tensors: Sequence[torch.Tensor],
        *,
        sends: bool,
        peer: int,
        on_done: Callable[[], None],
    ) -> GroupTransfer:
        """Begin a transfer, unless an abandoned one with that peer is not done.

        Without tags, the bytes of the abandoned one would be taken for those of the new one.
        """
        running = [transfer for transfer in self._begun.get(peer, []) if not transfer.done]
        stuck = next((transfer for transfer in running if transfer.abandoned), None)
        if stuck is not None:
            raise TransferError(
                peer, f"rank {peer}: {stuck.what} was abandoned and has not ended yet, so nothing else can be moved"
            )
        transfer = GroupTransfer(
            operation, tensors, sends=sends, peer=peer, on_done=on_done, through_host=self._through_host
        )
        self._begun[peer] = [*running, transfer]
        return transfer
