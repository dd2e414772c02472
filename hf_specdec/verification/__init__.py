"""Verification rules: which drafted tokens are accepted, and which token follows them.

A rule is a function `rule(trees, scores, score_rows, sequences, config)`. It takes the draft trees of B rows with up to N nodes, the
target's scores [R, V], and `score_rows` int64 numpy [B, N + 1], the row of `scores` that follows the root and each node. It
returns the accepted nodes bool [B, N] and the token after them int64 [B], on the scores' device, without waiting for it.
"""
