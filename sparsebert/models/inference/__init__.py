"""Inference of encoders in other engines than PyTorch, with the mask as an operator of the engine."""
