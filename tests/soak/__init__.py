"""`make soak` in parts: clusters of real processes under load, deaths and attacks."""
