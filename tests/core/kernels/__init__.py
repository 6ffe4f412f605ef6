"""hvdlite/_core/kernels: each variant of the reductions gives the bits of a plain loop."""
