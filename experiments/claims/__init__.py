"""The papers' claims: what each says, where our results lie, and the verdict that follows by one rule."""
