"""The universality theorems: their conditions on a mask and on a probability map, and their proofs as programs."""

from ..checks import check_installed


check_installed("the theory of a mask", "scipy")
