"""Between processes: control channel and transport of tensors of ranks, request lines. Knows no sequences."""
