"""KV beyond the pass under way: its tiers and forms, the host store, copies and staging."""
