"""SparseBERT: configuration, models, and what is saved for environments without this package."""
