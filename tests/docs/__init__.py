"""The README, CONTRIBUTING and the pages of docs/: what they link to, show and say is there."""
