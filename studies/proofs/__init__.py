"""The proofs of the universality theorems as programs."""
