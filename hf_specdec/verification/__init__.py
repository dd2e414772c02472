"""Verification rules, one idea a file: `rule(trees, scores, index, sequences, config)` → accepted nodes, token after them.

Shapes are those of `verify.begin_verification`: trees of B rows with up to N nodes, scores [R, V], and `index` int64 numpy
[B, N + 1], the row of `scores` that follows the root and each node. Returned are bool [B, N] and int64 [B], on the
scores' device; nothing crosses to the host.
"""
