"""Training runs: pre-training, fine-tuning, post-hoc search and two-stage pruning."""

from ..checks import check_installed


check_installed("training", "accelerate", "datasets")
