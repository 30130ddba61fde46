"""Reports on finished runs: tables and a web page."""
