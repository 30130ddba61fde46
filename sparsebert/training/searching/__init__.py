"""The search for the mask of a trained model."""
