"""Tokens from the files of a decoder."""
