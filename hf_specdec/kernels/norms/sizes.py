"""The largest input of the kernel."""

MOST_WIDTH = 16384  # one program of the kernel holds a whole row
