"""Our layers in SGLang's models: attention, experts, sampling and grammar masks."""
