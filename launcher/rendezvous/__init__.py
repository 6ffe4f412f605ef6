"""Hosts that start hvdrun themselves: how they find each other, prove who they are, and carry what
ssh carries elsewhere. May import `machine` and `agent`."""
