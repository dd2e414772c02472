"""Verification: which drafted tokens are accepted, and which token follows them."""
