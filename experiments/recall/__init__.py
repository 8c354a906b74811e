"""Recall with seeds: ten that choose the learning rate, ten others that report."""
