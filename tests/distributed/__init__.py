"""hvdlite.distributed: the backend of torch.distributed, and training on top of it."""
