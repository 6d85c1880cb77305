"""Stores pages in a file of the directory argv[1] and restores them; prints `equal`, `different` or the error."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from store_cases import Form, PlainPool, prepared, store_and_engine

from sgl_batch.kv_offload.store_errors import CopyError


def main() -> None:
    pool = PlainPool.random(layers=2, part_bytes=(5000, 70), pages=8)
    with store_and_engine(Form("file", 1), pool, Path(sys.argv[1]), checksums=True) as (store, engine):
        blocks = prepared(store, 4)
        try:
            engine.store_pages(range(2), range(4), blocks).wait()
        except CopyError as error:
            sys.stdout.write(f"errno {error.errno}: {error}\n")
            return
        store.complete_store(blocks)
        engine.load_pages(range(2), blocks, range(4, 8)).wait()
    pairs = [(new, old) for page in range(4) for new, old in zip(pool.page(page + 4), pool.page(page), strict=True)]
    sys.stdout.write("equal\n" if all(torch.equal(new, old) for new, old in pairs) else "different\n")


if __name__ == "__main__":
    main()
