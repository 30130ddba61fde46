"""How attention runs under a mask: the backends, what they read, how one is chosen, and the probability maps."""
