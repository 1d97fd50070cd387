"""A corpus generated with a model of fairseq: what fastgen-generate does."""
