"""A checked call, and the portable loop over its chunks."""
