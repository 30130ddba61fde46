"""Text, tokenizers, pre-training examples and fine-tuning tasks."""
