"""Relative attention compared with common alternatives: time and memory, side by side in one run.

``python -m benchmarks NAME`` from the repository's root; ``--help`` lists the names and the options.
"""
