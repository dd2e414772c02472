"""The engine in a thread or a process of its own, and the messages that cross."""
