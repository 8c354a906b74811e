"""The same tokens with contexts of 1K to 32K: does a model that was trained at 4096 tokens use what is further back?"""
