"""One call, checked, and the portable loop over its chunks."""
