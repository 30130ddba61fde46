"""How a mask is learned: what has logits, how they are sampled, budgeted, scheduled and pruned."""
