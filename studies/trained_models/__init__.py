"""Masks and mixers for a trained encoder."""
