"""Visibility, and the row of a table for each pair."""
