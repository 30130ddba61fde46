"""Encoders that transformers runs in a way of its own, and what is ours in them while they carry a mask."""
