"""Reading checkpoints of draft heads: formats, tensors, and the parts a head shares with its target."""
