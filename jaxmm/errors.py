"""Every error that jaxmm raises, in one tree. Host only.

JaxmmError
├── ConfigError (ValueError)          a setting that cannot work; names the setting
├── ModelError (ValueError)           a checkpoint that cannot be loaded; names the tensor or key
├── RequestError (ValueError)         the request is wrong; only this request fails
│   ├── MediaError                    a picture that cannot be used
│   │   └── MediaTooLarge             … because it exceeds a stated limit
│   ├── PlaceholderError              items and their places in the prompt do not match
│   ├── PromptTooLong                 more tokens, pages or rows than can ever fit
│   ├── SamplingError                 a sampling parameter outside its range
│   └── GrammarError                  a grammar or schema that cannot be followed
├── Overloaded (RuntimeError)         the queue is full; the same request may be sent again
├── RecompileError (RuntimeError)     a compile after warm-up while on_recompile = "raise"
├── NotFinite (ArithmeticError)       the model gave NaN or infinity; only this request fails
├── PeerLost (RuntimeError)           a host of the pod is gone, too slow, or came to other tokens
└── EngineStopped (RuntimeError)      the engine has been closed or its loop has died

A message says what was given, what the limit is, and what to do.
"""


class JaxmmError(Exception):
    """Base of all errors raised by jaxmm."""


class ConfigError(JaxmmError, ValueError):
    """A setting that cannot work."""


class ModelError(JaxmmError, ValueError):
    """A checkpoint directory that cannot be loaded."""


class RequestError(JaxmmError, ValueError):
    """A request that cannot be served as it stands; other requests are not affected."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """Say what is wrong, and, where it is known, which field or which place of the request."""
        super().__init__(message)
        self.param = param


class MediaError(RequestError):
    """A picture that cannot be decoded or processed."""


class MediaTooLarge(MediaError):
    """A picture beyond a stated limit of bytes, pixels, aspect ratio or patches."""


class PlaceholderError(RequestError):
    """Items and their places in the prompt do not match."""


class PromptTooLong(RequestError):
    """A prompt that can never fit, whatever else is running."""


class SamplingError(RequestError):
    """A sampling parameter outside its range."""


class GrammarError(RequestError):
    """A grammar or JSON schema that is wrong, too large, or cannot be followed to an end."""


class Overloaded(JaxmmError, RuntimeError):
    """The queue of waiting requests is full."""


class RecompileError(JaxmmError, RuntimeError):
    """Something was compiled after warm-up while the engine was told to refuse that."""


class NotFinite(JaxmmError, ArithmeticError):
    """The model gave NaN or infinity for a request, which ends; others go on."""


class PeerLost(JaxmmError, RuntimeError):
    """A host of the pod is gone, too slow, or came to other tokens; the pod ends."""


class EngineStopped(JaxmmError, RuntimeError):
    """The engine is closed, or its loop has ended with an error."""
