"""Training throughput of a 340M language model with each mixer: tokens per second, model FLOP utilisation, memory."""
