"""Layers with a state: recurrences and short convolutions over packed rows."""
