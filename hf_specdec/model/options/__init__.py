"""Options of a model's forward: compiled or rewritten layers, prepacked or quantized weights, batch-invariant operations."""
