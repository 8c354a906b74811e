"""The axes of a delta-rule mixer, one at a time, in one layer: decay and solve."""
