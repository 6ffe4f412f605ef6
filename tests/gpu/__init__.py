"""hvdlite.gpu on tensors that stand in for those of GPUs; with_gpu/ needs a real GPU."""
