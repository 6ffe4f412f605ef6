"""The examples run, learn, and print what the README shows."""
