"""Our subclasses of SGLang's tokenizer manager, scheduler and worker, and the agreement of several ranks."""
