"""The benchmarks: their plan, their measuring and their report, without long runs."""
