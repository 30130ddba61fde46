"""The tables and figures of SparseBERT (arXiv 2102.12871)."""
