"""
The studies: the papers' tables and figures, and what masks cost in quality. They are run from a checkout, by
`sparsebert reproduce NAME`, and are not part of the installed package.
"""
