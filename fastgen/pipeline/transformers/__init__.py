"""A corpus generated with a model of transformers: what fastgen-generate-transformers does."""
