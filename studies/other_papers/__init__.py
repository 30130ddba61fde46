"""
Tables and figures of O(n) Connections (arXiv 2006.04862) and Universal Approximators (arXiv 1912.10077), and recipes
at equal minutes, as in Cramming (arXiv 2212.14034).
"""
