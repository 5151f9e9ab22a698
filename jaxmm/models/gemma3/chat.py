"""Prompts of Gemma 3: what its processor puts around a picture's tokens. Host only."""

from pathlib import Path

from jaxmm.host.chat import ChatTokenizer

IMAGE_TOKEN = "<image_soft_token>"
"""Stands for each row of a picture."""
_START, _END = "<start_of_image>", "<end_of_image>"


def load_tokenizer(directory: str | Path) -> ChatTokenizer:
    """The checkpoint's, with a template that writes all that stands around a picture.

    The published template writes the start alone, and transformers' processor puts the rest into
    the rendered text; the line breaks of both belong to one stretch of text, and are encoded so.

    Raises:
        ModelError: No tokenizer there, or one that cannot be used.
    """
    whole = f"\n\n{_START}{IMAGE_TOKEN}{_END}\n\n"
    return ChatTokenizer.from_checkpoint(
        directory,
        image_token=IMAGE_TOKEN,
        rewrite=lambda template: template.replace(_START, whole),
    )
