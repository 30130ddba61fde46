"""What a mask is: the frozen value and its files, classical patterns, and the forms that kernels read."""
