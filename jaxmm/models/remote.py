"""Models at gs:// addresses: small files come to this host, weights stay and are read by parts.
Host only."""

import hashlib
import json
from pathlib import Path

from etils import epath

from jaxmm.errors import ModelError
from jaxmm.models.converted import DESCRIPTION
from jaxmm.models.json_files import read_json


def is_remote(model: str) -> bool:
    """Whether a model is named by an address and not by a path."""
    return model.startswith("gs://")


def fetch_small_files(address: str, cache: Path) -> Path:
    """Copy all but the weights of a converted checkpoint, and point at those where they are.

    Args:
        address: Of the directory that `jaxmm convert` wrote.
        cache: Directory for copies; each address has one, brought up to date here.

    Returns:
        A directory that everything but the weights can be read from.

    Raises:
        ModelError: There is no converted checkpoint, or it cannot be reached.
    """
    source = epath.Path(address)
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    copy = cache / digest / source.name
    copy.mkdir(parents=True, exist_ok=True)
    try:
        if not (source / DESCRIPTION).exists():
            raise ModelError(
                f"{address!r} holds no {DESCRIPTION}; write it with: jaxmm convert MODEL {address}"
            )
        for path in source.iterdir():
            if path.is_file():
                _replace(copy / path.name, path.read_bytes())
    except (OSError, ImportError) as e:  # gs:// needs gcsfs: the extra `gcs`
        raise ModelError(f"{address!r} cannot be read: {e}") from e
    description = read_json(copy / DESCRIPTION)
    description["weights"] = str(source / str(description.get("weights")))
    _replace(copy / DESCRIPTION, json.dumps(description).encode())
    return copy


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    temporary.replace(path)
