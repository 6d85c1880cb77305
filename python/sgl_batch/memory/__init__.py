"""Memory of this process and its GPU: how much is taken and free, and advice to the kernel."""
