"""Models of torch whose attention becomes the same few nodes."""
