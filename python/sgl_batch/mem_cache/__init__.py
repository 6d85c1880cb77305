"""Where KV lives: the device page pools, the allocator of their pages, the host KV store and copies between both."""
