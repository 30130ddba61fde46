"""Texts that are longer than an encoder reads."""
