"""The tokenizer of DeepSeek-VL2, and the special tokens that its processor adds. Host only.

Read from tokenizer.json as it stands: tokenizer_config.json calls it a Llama tokenizer, and it is
a byte-level BPE that some versions of transformers rebuild as what it is called.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmm.errors import ModelError
from jaxmm.models.json_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IMAGE, USER, ASSISTANT = "<image>", "<|User|>", "<|Assistant|>"
GROUNDING = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
"""What people write to ask where something is, and the model to say it. They bind no picture and
end no turn, so unlike all other special tokens a text may spell them."""
_FILE = "tokenizer.json"
_NO_TOKEN = -1


def open_tokenizer(directory: Path) -> "Tokenizer":
    """Load the tokenizer with all tokens that the processor knows.

    Raises:
        ModelError: There is none, or none that can be read.
    """
    from tokenizers import AddedToken, Tokenizer

    raw = read_json(directory / _FILE)
    for token in raw.get("added_tokens") or ():
        token["special"] = token["special"] and token["content"] not in GROUNDING
    try:
        tokenizer = Tokenizer.from_str(json.dumps(raw))
    except Exception as error:  # noqa: BLE001  # the package raises nothing narrower
        raise ModelError(f"{str(directory / _FILE)!r} is no tokenizer: {error}") from None
    # in the processor's order: what a file lacks gets the ids that the processor would give it
    for content in (IMAGE, *GROUNDING, USER, ASSISTANT):
        if tokenizer.token_to_id(content) is None:
            special = content not in GROUNDING
            tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
    return tokenizer


def image_token_id(directory: Path) -> int:
    """Id of the token that marks a picture's place; -1 where there is no tokenizer to ask."""
    if not (directory / _FILE).exists():
        return _NO_TOKEN
    token_id: int | None = open_tokenizer(directory).token_to_id(IMAGE)
    assert token_id is not None, "the tokenizer was opened without its picture token"
    return token_id
