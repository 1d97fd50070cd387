"""Memory that is kept between calls: how much may be kept, and what keeps it."""
