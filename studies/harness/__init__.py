"""The runner of experiments: cells, results, tables and pictures."""
