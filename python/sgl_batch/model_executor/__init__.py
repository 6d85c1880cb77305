"""The coroutine forward: the loop over layers, the accumulation buffer, and the model runner around them."""
