"""Training runs: pre-training, fine-tuning, post-hoc search, two-stage pruning, and their recipes."""

from ..checks import check_installed


check_installed("training", "accelerate", "datasets")
