"""What a rank tells about itself, to its keeper and to whoever looks for the cause of a failure."""
