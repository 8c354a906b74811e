"""Whether a training run that is killed and resumed repeats the bits of one that is not."""
