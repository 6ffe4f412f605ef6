"""What runs only where there is a GPU: `make test-gpu PYTHON=...`. pytest does not look here."""
