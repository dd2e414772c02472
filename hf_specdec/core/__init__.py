"""The data that flows through the decoding loop. Every other package may import it; it imports only `kernels`."""
