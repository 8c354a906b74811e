"""Compiles every kernel for cards that are described instead of present: registers, spills, shared memory."""
