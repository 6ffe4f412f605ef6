"""hvdrun on one machine, and every command on the documentation's pages."""
