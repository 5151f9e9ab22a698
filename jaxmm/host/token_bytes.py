"""What each token id stands for, in bytes. Host only."""

from typing import Any

from tokenizers.decoders import ByteLevel

from jaxmm.errors import ModelError


def bytes_of_tokens(backend: Any, vocab_size: int) -> tuple[bytes, ...]:
    """List the UTF-8 bytes of every id of a byte-level tokenizer, [vocab_size].

    Args:
        backend: A `tokenizers.Tokenizer`.
        vocab_size: One more than its largest id; an id without a token is empty.

    Raises:
        ModelError: The tokenizer is not byte-level.
    """
    if not isinstance(backend.decoder, ByteLevel):
        kind = type(backend.decoder).__name__
        raise ModelError(f"the tokenizer's decoder is {kind}; jaxmm streams byte-level ones alone")
    table = {char: byte for byte, char in enumerate(_byte_characters())}
    spellings = [""] * vocab_size
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        spellings[i] = token
    return tuple(_spelled(token, table) for token in spellings)


def _spelled(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[char] for char in token])
    except KeyError:
        return token.encode()  # an added token is written as it stands


def _byte_characters() -> list[str]:
    """The visible character that stands for each byte in byte-level vocabularies (GPT-2).

    Bytes that print stand for themselves; the others, in order, for the characters from 256 up.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
