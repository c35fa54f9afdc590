"""Which release of which runtime runs which profile: one small graph of every form, run in each."""
