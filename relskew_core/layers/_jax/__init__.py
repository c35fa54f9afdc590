"""What the modules of flax and of equinox share."""
