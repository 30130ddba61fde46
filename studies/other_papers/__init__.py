"""Tables and figures of O(n) Connections (arXiv 2006.04862) and of Universal Approximators (arXiv 1912.10077)."""
