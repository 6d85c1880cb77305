"""The engine as a stage of Ray Data: a processor of `ray.data.llm`, and a class for `Dataset.map_batches`."""
