"""What a model would take on TPUs that are not here: memory, time, talk between chips."""
