"""The tensor operations of the loop: each has a definition in plain torch (`reference`)."""
