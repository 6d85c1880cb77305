"""`sgl-batch instances`: the engines of a server."""
