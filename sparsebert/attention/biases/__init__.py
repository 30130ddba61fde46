"""A mask as a bias of the scores."""
