"""The interface to array libraries: namespaces, checks that name their argument, and the softmax."""
