"""Two-stage pruning."""
