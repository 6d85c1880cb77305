"""Our attention backends."""
