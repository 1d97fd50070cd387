"""Random models, options, modes and edits: fastgen against the stock host, call by call."""
