"""From a target's logits to what may be chosen: logits processors, temperature, top-k, top-p, min-p, and the random streams."""
