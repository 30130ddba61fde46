"""Which backend serves a request: by a table, by measuring, and only if its self-check passed."""
