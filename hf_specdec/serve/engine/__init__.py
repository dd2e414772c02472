"""The engine: continuous batching around one SpeculativeDecoder."""
