"""Expert runners, and the exchange of tokens between expert-parallel ranks."""
