"""Our expert runners."""
