"""The processes of a sharded model's other ranks."""
