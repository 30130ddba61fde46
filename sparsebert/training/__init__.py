"""Training runs: pre-training, fine-tuning, post-hoc search, two-stage pruning, and their recipes."""
