"""The HTTP side of the server: bodies, endpoints, and the application around them."""
