"""How hosts are changed, and changed back; and what on a model is neither the host's code nor ours."""
