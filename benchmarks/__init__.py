"""Relative attention beside what people use today: time and memory, side by side in one run.

``python -m benchmarks`` from the repository's root; ``--help`` lists the options.
"""
