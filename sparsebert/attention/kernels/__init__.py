"""The attention backends: plain PyTorch, its fused attention, FlexAttention, and our kernels for CPUs and GPUs."""
