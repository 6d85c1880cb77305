"""KV pages on the device: their pools, their layout and their allocator."""
