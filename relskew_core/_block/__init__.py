"""Projections around attention."""
