"""Communication between ranks: the control channel, the transport of tensors, shared memory. It knows no sequences."""
