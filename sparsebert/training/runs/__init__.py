"""The life of a run: its checks, folder, checkpoints, and card."""
