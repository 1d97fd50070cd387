"""A service for requests over HTTP, on Ray Serve: `fastgen-serve`, from `pip install 'fastgen[ray]'`."""
