"""What benchmarks share: masks by name, timing in turns, reports, and the tables made from them."""
