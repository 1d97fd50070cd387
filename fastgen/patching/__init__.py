"""Changes hosts and changes them back, and finds code on a model that is neither the host's nor ours."""
