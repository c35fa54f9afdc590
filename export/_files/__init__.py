"""Files of models: written whole or not at all, and the library of the operator."""
