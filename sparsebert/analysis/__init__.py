"""What a mask or a run turned out to be: which positions matter, what it costs, pictures, tables, statistics."""
