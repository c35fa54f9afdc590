"""Mutation testing: small changes of the code, one at a time, each of which some test must notice: ``make mutants``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
