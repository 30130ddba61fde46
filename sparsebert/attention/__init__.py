"""
How attention runs under a mask: the backends, what they read, how one is chosen, and the probability maps.

Importing this package registers the backends in the attention tables of transformers.
"""

from . import interface as interface
