"""The universality theorems: their conditions on a mask, and their proofs as programs."""
