"""`sgl-batch simulate`: how long a batch takes on a cluster that is not here, by this engine and by others."""
