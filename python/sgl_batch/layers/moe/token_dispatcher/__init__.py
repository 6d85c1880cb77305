"""Exchange of tokens between expert-parallel ranks, apart from what the experts compute."""

from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher
from sgl_batch.layers.moe.token_dispatcher.create import NAMES, create_token_dispatcher

__all__ = ["NAMES", "Received", "TokenDispatcher", "create_token_dispatcher"]
