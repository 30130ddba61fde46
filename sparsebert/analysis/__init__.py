"""What a mask or run turned out to be: importance of positions, cost, pictures, tables, statistics."""
