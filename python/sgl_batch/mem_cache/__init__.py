"""Where KV lives: the device page pool and the allocator of its pages."""
