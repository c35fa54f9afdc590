"""The shared part of the modules of flax and equinox."""
