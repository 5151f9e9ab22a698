"""Whole models from shallow ones: layers are unrolled, so a step's figures are a line. Host only.

A step of a large model compiles for minutes, a quarter of it for each ten layers. So it is compiled
with few layers, and with two more; what the two tell of a layer holds for the others.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from jaxmm.models.config import ModelConfig
from jaxmm.planner.compiler import CompiledStep


@dataclass(frozen=True, slots=True)
class Depths:
    """Layers of the decoder and of the encoder in one compile."""

    text: int
    vision: int


def shallow_depths(model: ModelConfig) -> tuple[Depths, Depths]:
    """The two depths to compile; both are the whole model where it has no more layers."""
    levels = len(model.vision.deepstack_layers)
    first, second = max(2, levels + 1), max(2, levels + 1) + 2
    text, vision = model.text.num_layers, model.vision.depth
    return (
        Depths(min(first, text), min(first, vision)),
        Depths(min(second, text), min(second, vision)),
    )


def with_depths(model: ModelConfig, depths: Depths) -> ModelConfig:
    """The model with fewer layers, of each kind as many as fit its share in the whole one.

    Deepstack's levels stay, taken from the first layers: they are rows of the arena.
    """
    text, vision = model.text, model.vision
    share = len(vision.full_attention_layers) / vision.depth
    num_full = max(1, round(depths.vision * share)) if vision.full_attention_layers else 0
    levels = len(vision.deepstack_layers)
    return dataclasses.replace(
        model,
        text=dataclasses.replace(
            text,
            num_layers=depths.text,
            dense_layers=tuple(i for i in text.dense_layers if i < depths.text),
        ),
        vision=dataclasses.replace(
            vision,
            depth=depths.vision,
            full_attention_layers=tuple(range(depths.vision - num_full, depths.vision)),
            deepstack_layers=tuple(range(levels)),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What a step of the whole model takes on one chip."""

    argument_bytes: int
    temporary_bytes: int
    """What it takes beside its arguments, results that are not written in their place among it."""
    collectives: dict[str, int]
    """Count of each kind, sampling left out."""
    collective_bytes: int
    compile_seconds: float
    """Processor time; rather too little."""


def extended(
    first: CompiledStep, second: CompiledStep, depths: tuple[int, int], whole: int
) -> StepFigures:
    """The line through two compiles, at the depth of the whole model.

    Args:
        first: Compiled with the fewer layers.
        second: With the more layers; the same where there are no more.
        depths: Layers of both.
        whole: Layers of the model.
    """
    steps = (whole - depths[0]) / (depths[1] - depths[0]) if depths[1] > depths[0] else 0.0

    def line(a: float, b: float) -> float:
        return a + (b - a) * steps

    def beside(step: CompiledStep) -> int:
        return step.peak_bytes - step.argument_bytes

    counts: tuple[Counter[str], Counter[str]] = (first.num_collectives, second.num_collectives)
    kinds = sorted(counts[0] | counts[1])
    return StepFigures(
        argument_bytes=round(line(first.argument_bytes, second.argument_bytes)),
        temporary_bytes=round(max(line(beside(first), beside(second)), beside(second))),
        collectives={kind: round(line(counts[0][kind], counts[1][kind])) for kind in kinds},
        collective_bytes=round(line(first.collective_bytes, second.collective_bytes)),
        # the first of a process pays for what is done once: the line may even fall
        compile_seconds=max(line(first.cpu_seconds, second.cpu_seconds), second.cpu_seconds),
    )
