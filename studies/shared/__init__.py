"""What the cells of several experiments are made of."""
