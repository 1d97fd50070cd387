"""The demo: one beam search job by stock transformers and by fastgen, in turn, compared."""
