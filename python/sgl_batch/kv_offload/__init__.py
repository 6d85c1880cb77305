"""KV outside the forward pass: its tiers and forms, the host KV store, copies and staging.

Theory of operation. KV lies in two tiers. The device tier is a pool of pages (mem_cache/), which attention reads and
writes. The store tier is the host KV store: blocks in memory or in a file, shared by the ranks of a machine. A page is
the KV of `page_size` tokens in all layers; a block has room for one page.

    core/kv_policy.py       decides which sequences prefill, restore, run and leave
        |
    KVForm                  carries that out on requests
        |
    KVTiers                 one rank's device pages, store blocks and staging
        |-- StoredKV        the blocks of each sequence, and the copies to them
        |-- PrefillStaging  KV of a prefill group on its way to the store, layer by layer
        |-- DecodeStaging   KV of a streamed decode step, layer by layer and sub-batch by sub-batch
        |
    CopyEngine              copies pages to blocks and back; each copy has a ticket
        |
    HostKVStore             the blocks: FREE, WRITING or READY

The four forms differ in where KV lies:

- on the device alone (DeviceKV): a sequence holds all pages that it can need from its admission on.
- inclusive (StoreKV): all full pages of a sequence are in the store, also while it runs on the device.
- exclusive (ExclusiveKV): a sequence is in one tier; all its pages move together.
- streamed (StreamedKV): all KV is in the store, and passes through the device in each decode step. The engine may
  change between streamed and inclusive at a boundary.

Two-phase write-through: when a page fills, `prepare_store` takes a block, which is WRITING; the copy engine copies the
page during the next steps; when the ticket is done, `complete_store` makes the block READY. Until then the block cannot
be loaded or shared, and the page is not given to another sequence. So a suspended sequence has only its open page to
copy, and an error of a copy reaches the rank before its data is used.

Staging: a prefill group on its way to the store writes its layers in turns to two halves of staged memory; each half is
copied away while the next layer runs (BatchGen 5.2). A streamed decode step uses the device's pages as two halves, each
for a sub-batch of one layer; the next sub-batch's KV comes while the current one is attended (BatchGen 5.3).
"""
