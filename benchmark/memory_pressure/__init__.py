"""Measures many sequences on a device that holds the KV of few: with a host KV store, without, and stock SGLang."""
