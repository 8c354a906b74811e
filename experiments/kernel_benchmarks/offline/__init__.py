"""Compiles every Triton kernel for cards that are described instead of present: registers, spills, shared memory."""
