"""What fastgen-generate-transformers does with transformers."""
