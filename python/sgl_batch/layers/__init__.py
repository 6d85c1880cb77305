"""Our layers under SGLang's models: attention, experts, sampling and grammar masks."""
