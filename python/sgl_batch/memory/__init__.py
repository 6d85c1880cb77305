"""Memory of this process and its GPU: what is taken, what is free, and advice to the kernel."""
