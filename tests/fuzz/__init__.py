"""Random calls, gradients, exports, files and wrong arguments, for as long as one likes: ``make fuzz SECONDS=60``."""
