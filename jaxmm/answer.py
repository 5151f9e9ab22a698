"""What a request in progress has produced, and how it is told to the caller. Host only."""

import logging
from collections.abc import Callable, Set
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from jaxmm.errors import JaxmmError
from jaxmm.host.decodes import Gone
from jaxmm.host.detokenize import Detokenizer
from jaxmm.host.item import Modality, Prompt
from jaxmm.host.sequence import Sequence
from jaxmm.request import Delta, FinishReason, Request, TokenLogprob, Usage

logger = logging.getLogger(__name__)

OnEvent = Callable[[Delta | JaxmmError], None]
"""Called on the engine's thread; must not block. An error ends the request."""


def tell(request: Request, on_event: OnEvent, event: Delta | JaxmmError) -> bool:
    """Pass an event on; False: the listener failed, and its request must end."""
    try:
        on_event(event)
    except Exception:
        logger.exception("listener failed request=%s", request.id)
        return False
    return True


@dataclass(slots=True)
class Answer:
    """One request in progress: its sequences, and the text of each."""

    request: Request
    on_event: OnEvent
    sequences: tuple[Sequence, ...]
    detokenizers: tuple[Detokenizer, ...]
    eos_ids: Tokens[int]
    """The model's own."""
    end_ids: Set[int]
    """Ids that end a completion of this request."""
    gone: Gone
    """Done when the request is aborted."""
    home: int | None = None
    """The replica that serves it, where that is settled: it has scored its videos."""
    num_open: int = field(init=False)
    """Completions that are not finished."""

    def __post_init__(self) -> None:
        self.num_open = len(self.sequences)

    @classmethod
    def start(
        cls,
        request: Request,
        sequences: tuple[Sequence, ...],
        on_event: OnEvent,
        *,
        token_bytes: Tokens[bytes],
        special_ids: Set[int],
        eos_ids: Tokens[int],
        gone: Gone,
    ) -> "Answer":
        """Begin with nothing said."""
        params = request.sampling
        detokenizers = tuple(Detokenizer(token_bytes, special_ids, params.stop) for _ in sequences)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
        return cls(request, on_event, sequences, detokenizers, eos_ids, ends, gone)

    def take(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> Delta:
        """Note a token that the sequence has just got.

        Returns:
            What to tell the caller; its `finish_reason` says whether the completion ends here.

        Raises:
            GrammarError: The request's grammar cannot be followed further.
        """
        detokenizer = self.detokenizers[sequence.index]
        ends = token_id in self.end_ids
        # a stop id that is an ordinary token is not part of the text either
        text, stopped = detokenizer.push(() if ends else (token_id,))
        ends = ends or stopped or self._completes(sequence, token_id)
        reason: FinishReason | None = "stop" if ends else None
        if reason is None and sequence.is_full:
            reason = "length"
        if reason is not None and not stopped:
            text += detokenizer.finish()
        self.num_open -= reason is not None
        return Delta(
            id=self.request.id,
            index=sequence.index,
            text=text,
            token_ids=(token_id,),
            logprobs=None if logprob is None else (logprob,),
            finish_reason=reason,
            usage=self.usage() if reason is not None else None,
        )

    def _completes(self, sequence: Sequence, token_id: int) -> bool:
        """Whether the output, which this token is the last of, is all that its grammar allows."""
        if sequence.matcher is None:
            return False
        sequence.matcher.take(token_id, sequence.held_back(self.eos_ids))
        return sequence.matcher.is_complete

    def usage(self) -> Usage:
        """Tokens so far, of all completions."""
        prompt = self.sequences[0].prompt
        return Usage(
            prompt_tokens=prompt.num_tokens,
            image_tokens=_num_tokens(prompt, Modality.IMAGE),
            video_tokens=_num_tokens(prompt, Modality.VIDEO),
            cached_tokens=self.sequences[0].num_cached,
            completion_tokens=sum(len(s.output_ids) for s in self.sequences),
        )


def _num_tokens(prompt: Prompt, modality: Modality) -> int:
    return sum(item.num_tokens for item in prompt.items if item.modality is modality)
