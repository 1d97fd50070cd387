"""A service for requests over HTTP, on Ray Serve: `fastgen-serve`, from the extra `ray`."""
