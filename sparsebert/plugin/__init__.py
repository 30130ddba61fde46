"""What `import sparsebert` adds to transformers and PEFT."""
