"""What we use of SGLang's objects, as types: the attributes and methods that we read, write and call, and no others.

Nothing here imports SGLang. A test checks that its classes have every name, so that an upgrade that drops one is seen.
Where nothing else is said, token counts are tokens, slots are places of one token's KV, and tensors are on the
scheduler's device.
"""
