"""What a run of several processes loses when they are killed at random moments."""
