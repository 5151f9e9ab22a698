"""Finds out which rows the videos of a prompt keep, where that is not known yet. Host only."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxmm.host.decodes import Gone
from jaxmm.host.item import Item, Prompt
from jaxmm.host.pruning import (
    KnownPrunings,
    Pruning,
    choose_rows,
    clips_of,
    expected_rows,
    num_kept,
    prune,
    pruning_digest,
)
from jaxmm.host.scoring import Scoring

Load = Callable[[range], Sequence[npt.NDArray[np.uint8]]]
"""Features of a video's steps, by their indices among the prompt's items."""


@dataclass(slots=True)
class PrunedVideos:
    """A prompt whose videos are to be pruned at one rate, and what is known of each."""

    prompt: Prompt
    """With all rows."""
    rate: float
    salt: str
    known: dict[int, Pruning] = field(default_factory=dict)
    """By the index of the video's first item."""
    unknown: dict[int, tuple[range, bytes]] = field(default_factory=dict)
    """The same: the video's items, and its `pruning_digest`."""

    def pruned(self) -> Prompt:
        """The prompt, every video pruned."""
        assert not self.unknown, "the rows of a video are not chosen"
        return prune(self.prompt, self.known)

    def expected(self) -> Prompt:
        """The same with rows that are as many, where those that will be kept are not known."""
        guesses = {
            first: Pruning(
                expected_rows(len(clip), self.prompt.items[first].num_rows, self.rate), digest
            )
            for first, (clip, digest) in self.unknown.items()
        }
        return prune(self.prompt, self.known | guesses)


class Pruner:
    """Has videos encoded and compared; thread-safe."""

    def __init__(self, known: KnownPrunings, post: Callable[[Scoring], None]) -> None:
        """Take the parts.

        Args:
            known: What was kept of videos seen before.
            post: Gives a video to the loop.
        """
        self._known = known
        self._post = post

    def find(self, prompt: Prompt, rate: float, salt: str) -> PrunedVideos:
        """List a prompt's videos that lose something at this rate."""
        videos = PrunedVideos(prompt, rate, salt)
        for clip in clips_of(prompt.items) if rate else ():
            steps = prompt.items[clip.start : clip.stop]
            rows = steps[0].num_rows
            if num_kept(len(steps), rows, rate) == len(steps) * rows:
                continue
            digest = pruning_digest(steps, rate)
            known = self._known.get(salt, digest)
            if known is None:
                videos.unknown[clip.start] = clip, digest
            else:
                videos.known[clip.start] = known
        return videos

    def score(self, videos: PrunedVideos, load: Load, gone: Gone, then: Callable[[], Any]) -> None:
        """Have the unknown videos encoded, and their rows chosen.

        Args:
            videos: Changed: all are known when `then` is called.
            load: Gives the features of a video that was not decoded, because its file was known.
            gone: When done, nothing more is encoded, and `then` is not called.
            then: Called once, on the loop's thread.
        """
        scorings = []
        for first, (clip, _) in videos.unknown.items():
            steps = self._with_features(videos, clip, load)
            on_scores = partial(self._take, videos, first, then)
            scorings.append(Scoring(steps, videos.salt, on_scores, gone.done))
        for scoring in scorings:
            self._post(scoring)

    def _take(
        self,
        videos: PrunedVideos,
        first: int,
        then: Callable[[], Any],
        scores: npt.NDArray[np.float32],
    ) -> None:
        _, digest = videos.unknown.pop(first)
        pruning = Pruning(choose_rows(scores, videos.rate), digest)
        videos.known[first] = pruning
        self._known.put(videos.salt, pruning)
        if not videos.unknown:
            then()

    def _with_features(self, videos: PrunedVideos, clip: range, load: Load) -> tuple[Item, ...]:
        items = list(videos.prompt.items)
        if any(items[index].features is None for index in clip):
            for index, features in zip(clip, load(clip), strict=True):
                items[index] = dataclasses.replace(items[index], features=features)
            videos.prompt = dataclasses.replace(videos.prompt, items=tuple(items))
        return tuple(items[clip.start : clip.stop])
