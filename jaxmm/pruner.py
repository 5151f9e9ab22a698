"""Finds out which rows the videos of a prompt keep, where that is not known yet. Host only."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
from jaxmm.host.scoring import Scores

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
    home: int | None = None
    """The replica that scores the unknown ones."""

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
    """Finds the videos that are pruned, and chooses their rows by their scores; thread-safe."""

    def __init__(self, known: KnownPrunings) -> None:
        """Take what was kept of videos seen before."""
        self._known = known

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

    def load_unknown(self, videos: PrunedVideos, load: Load) -> list[tuple[Item, ...]]:
        """The steps of each unknown video, all with features.

        Args:
            videos: Their prompt gets the features too.
            load: Gives the features of a video that was not decoded, because its file was known.
        """
        items = list(videos.prompt.items)
        clips = [clip for clip, _ in videos.unknown.values()]
        for clip in clips:
            if any(items[index].features is None for index in clip):
                for index, features in zip(clip, load(clip), strict=True):
                    items[index] = dataclasses.replace(items[index], features=features)
        videos.prompt = dataclasses.replace(videos.prompt, items=tuple(items))
        return [tuple(items[clip.start : clip.stop]) for clip in clips]

    def choose(self, videos: PrunedVideos, scores: Sequence[Scores]) -> None:
        """Choose the rows of the unknown videos, all of which are known then.

        Args:
            videos: Changed.
            scores: Of each unknown video, in their order.
        """
        unknown = list(videos.unknown.items())
        for (first, (_, digest)), changes in zip(unknown, scores, strict=True):
            pruning = Pruning(choose_rows(changes, videos.rate), digest)
            videos.known[first] = pruning
            self._known.put(videos.salt, pruning)
        videos.unknown.clear()
