"""What schedulers send over several sockets is received in the order of each answer's tokens."""

from __future__ import annotations

from array import array
from pathlib import Path

import zmq

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.ordered_outputs import ReceivedInOrder

with bootstrap.importing():
    from sglang.srt.managers.io_struct import BatchTokenIDOutput, FreezeGCReq, sock_recv, sock_send


def output(rid: str, start: int, tokens: list[int], *, is_last: bool = False) -> BatchTokenIDOutput:
    """Return the message of a scheduler that has sent `start` tokens of an answer, and now sends `tokens`."""
    given = {
        "rids": [rid],
        "finished_reasons": [{"type": "length", "length": start + len(tokens)} if is_last else None],
        "decode_ids": [array("q", tokens)],
        "output_ids": [array("q", tokens)],
        "completion_tokens": [start + len(tokens)],
        "decoded_texts": [""],
        **{name: [0] for name in ("read_offsets", "prompt_tokens", "reasoning_tokens", "cached_tokens")},
        **{name: [False] for name in ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")},
    }
    return BatchTokenIDOutput(**{**dict.fromkeys(BatchTokenIDOutput.__struct_fields__), **given})


def test_a_message_that_overtakes_the_one_before_a_move_waits(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        address = f"ipc://{tmp_path}/outputs"
        receiver.bind(address)
        with context.socket(zmq.PUSH) as source, context.socket(zmq.PUSH) as target:
            source.connect(address)
            target.connect(address)
            receive = ReceivedInOrder(sock_recv)
            sock_send(target, output("moved", 2, [7, 8], is_last=True))
            assert receiver.poll(10_000)
            sock_send(target, FreezeGCReq())
            first = receive(receiver)
            sock_send(source, output("moved", 0, [5, 6]))
            second, third = receive(receiver), receive(receiver)
    assert isinstance(first, FreezeGCReq)
    assert [list(message.output_ids[0]) for message in (second, third)] == [[5, 6], [7, 8]]
