"""What pre-training from the start shows of searches, in the first minutes."""
