"""Moving sequences between ranks (BatchGen 4.2, MIGRATE): the protocol, and its sender and receiver."""
