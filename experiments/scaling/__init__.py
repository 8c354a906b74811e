"""Differences between mixers at three sizes, with parameters matched."""
