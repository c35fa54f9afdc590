"""What an array library is to us: its namespace, checks that name their argument, the softmax."""
