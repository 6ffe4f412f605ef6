"""What tests share: worlds of ranks, programs run as a user runs them, the choice of tests."""
