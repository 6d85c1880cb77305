"""Between ranks: the control channel and the transport of tensors. Knows no sequences."""
