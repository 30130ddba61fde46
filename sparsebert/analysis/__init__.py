"""Analysis of masks and runs: which positions matter, what a mask costs, pictures, tables and statistics."""
