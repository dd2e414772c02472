"""Files of draft heads: which format, every tensor in its place, and what is the target's."""
