"""The universality theorems: their conditions on a mask and on a probability map, and their proofs as programs."""
