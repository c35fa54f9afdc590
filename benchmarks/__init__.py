"""Relative attention beside what people use today: time and memory, side by side in one run.

``python -m benchmarks NAME`` from the repository's root; ``--help`` lists the names and the options.
"""
