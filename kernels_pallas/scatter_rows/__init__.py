"""Vision rows from the arena into the text embeddings of a step, in place."""
