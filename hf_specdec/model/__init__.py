"""Runs transformers models and draft heads over packed rows and a paged cache."""
