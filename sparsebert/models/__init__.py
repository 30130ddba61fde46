"""The models that carry a mask: configuration, BERT classes, other architectures, loading."""
