"""Attention of the text decoder over paged KV; decode rows, extend runs, both in one step."""
