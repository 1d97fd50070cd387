"""A service for requests over HTTP: `fastgen-serve`; needs the extra `ray` or, for one replica without Ray, `serve`."""
