"""Owns the Triton kernel that copies pages between a GPU's memory and blocks of pinned memory. Not yet run on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages_kernel(
    addresses, part_words, pages, blocks, memory, block_words, layer_words, first_layer, num_layers, num_parts, total,
    TO_STORE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy items, each one part of one layer of one page, which the programs take in turns. A word has 8 bytes.

    `addresses` [layers * parts]: the address of a part's first page. `part_words` [parts, 2]: a part's words in a page,
    and its offset in a layer of a block. `memory`: the address of the first block.
    """
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        part = item % num_parts
        layer = first_layer + item // num_parts % num_layers
        pair = item // (num_parts * num_layers)
        words = tl.load(part_words + 2 * part)
        base = tl.load(addresses + layer * num_parts + part).to(tl.pointer_type(tl.int64))
        in_page = base + tl.load(pages + pair) * words
        offset = tl.load(blocks + pair) * block_words + layer * layer_words + tl.load(part_words + 2 * part + 1)
        in_block = memory.to(tl.int64).to(tl.pointer_type(tl.int64)) + offset
        for start in range(0, words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            if TO_STORE:
                tl.store(in_block + word, tl.load(in_page + word, word < words), word < words)
            else:
                tl.store(in_page + word, tl.load(in_block + word, word < words), word < words)
