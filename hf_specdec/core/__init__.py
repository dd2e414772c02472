"""What flows through the loop: plain data that every other room may import, and that imports none of them."""
