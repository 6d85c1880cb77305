"""Owns the types of SGLang's objects: the attributes and methods that we read, write and call, and no others.

Nothing here imports SGLang. A test checks that SGLang's classes have every name, so that an upgrade that drops one
fails. Unless stated otherwise, lengths are in tokens, and tensors are on the scheduler's device. A KV index is the
index of one token's KV in the device's pool; a request slot is a row of the request table.
"""
