"""Who sees whom, and which row of a table belongs to it."""
