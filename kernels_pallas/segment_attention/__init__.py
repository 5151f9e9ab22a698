"""Attention among the patches of one image, for several images in one lane."""
