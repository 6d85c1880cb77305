"""Migration of sequences between ranks (BatchGen 4.2, MIGRATE): the protocol, its sender and its receiver."""
