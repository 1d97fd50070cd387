"""The command lines: fastgen-demo, fastgen-generate, fastgen-generate-transformers."""
