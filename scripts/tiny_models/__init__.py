"""Makes tiny checkpoints: trained ones by scripts/make_tiny_models.py, of random weights for bring-ups and tests."""

from sgl_batch.sglang_adapter import bootstrap

# transformers imports torchvision, whose compiled part may not fit this torch.
bootstrap.prepare()
