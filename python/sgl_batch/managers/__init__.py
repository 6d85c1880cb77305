"""Our subclasses of SGLang's processes, and the wiring that starts them."""
