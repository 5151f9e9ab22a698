"""New KV rows of a step into the slots of their pages, in place."""
