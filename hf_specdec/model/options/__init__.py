"""What a model's forward may be run with: compiled or rewritten layers, packed or quantized weights, batch-invariant operations."""
