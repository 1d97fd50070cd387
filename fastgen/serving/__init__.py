"""A service for requests over HTTP, on Ray Serve: `fastgen-serve`; needs the extra `ray`."""
