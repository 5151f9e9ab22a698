"""What serving a model on a TPU slice takes, by its config.json and the compiler. Host only."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend, check_sizes, most_chips, rests
from jaxmm.device.backend import spread_kv_heads as spread
from jaxmm.device.executables import Key
from jaxmm.device.lowering import Lowering
from jaxmm.errors import ConfigError
from jaxmm.models.config import ModelConfig
from jaxmm.models.lane_forms import lane_patches, lane_rows
from jaxmm.models.loading import param_shapes
from jaxmm.planner.compiler import CompiledStep, chip_bytes, compile_step
from jaxmm.planner.depth import Depths, StepFigures, extended, shallow_depths, with_depths
from jaxmm.planner.floors import decode_floor, encode_floor, extend_floor, sums_floor
from jaxmm.planner.question import Question, read_question
from jaxmm.planner.result import Memory, Picture, Plan, Requests, Step
from jaxmm.sizes import Sizes

DEFAULT_LENGTHS = (1024, 4096, 16384)
"""Tokens of a request, prompt and output together."""
_PICTURES = ((224, 224), (448, 448), (1024, 768), (1920, 1080))


def plan(
    model: str | Path,
    topology: str,
    config: EngineConfig | None = None,
    *,
    tensor_parallel: int = 0,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
) -> Plan:
    """Work out what serving a model takes on TPUs that are not here.

    The steps are compiled by the TPU compiler as the engine would, with few layers, and the figures
    taken on to the whole depth (`jaxmm.planner.depth`). No weights are read and no TPU is opened.

    Args:
        model: Directory of a Hugging Face checkpoint, or a config.json alone.
        topology: Of the slice: `v5e:4x8`, `v5p:2x2x4`.
        config: Settings; None: the defaults.
        tensor_parallel: Chips that each replica of the model is split over; 0: what `config` says,
            and where it leaves that at 1, as many as there are and the model can be split over.
        lengths: Tokens of requests to count room for, prompt and output together.

    Returns:
        The plan; printed it is a table, in a notebook too.

    Raises:
        ConfigError: No TPU compiler, no such topology, a length below 1, or settings that cannot
            work.
        ModelError: config.json is missing or says what jaxmm does not have.
    """
    check_lengths(lengths)
    question = read_question(model, topology, config)
    return make_plan(question, tensor_parallel=tensor_parallel, lengths=lengths)


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ConfigError where one is not the length of a request."""
    if any(length < 1 for length in lengths):
        raise ConfigError(f"length={min(lengths)} is below 1; it counts the tokens of a request")


def make_plan(
    question: Question, *, tensor_parallel: int = 0, lengths: Sequence[int] = DEFAULT_LENGTHS
) -> Plan:
    """The plan of a question that was read; arguments and errors are those of `plan`."""
    num_chips = tensor_parallel or _default_chips(question)
    for rest in rests(question.model, num_chips, split_encoder=question.split_encoder):
        raise ConfigError(f"tensor_parallel={num_chips} does not divide the model's {rest}")
    if num_chips > len(question.devices):
        raise ConfigError(
            f"tensor_parallel={num_chips} and {question.topology} has "
            f"{len(question.devices)} devices"
        )
    try:
        sizes = question.settle(num_chips)
    except ConfigError as e:
        return _without_room(question, num_chips, str(e))
    return _compiled_plan(question, num_chips, sizes, lengths)


def _default_chips(question: Question) -> int:
    asked = question.config.tensor_parallel
    if asked > 1:
        return asked
    return most_chips(question.model, len(question.devices), split_encoder=question.split_encoder)


def _without_room(question: Question, num_chips: int, reason: str) -> Plan:
    """A plan that ends before anything is compiled."""
    model = spread(question.model, num_chips)
    backend = question.backend(num_chips)
    params = param_shapes(
        model, question.dtype, lambda path: backend.sharding(backend.param_spec(path))
    )
    return Plan(
        model=question.name,
        topology=question.topology,
        num_devices=len(question.devices),
        tensor_parallel=num_chips,
        sizes=None,
        memory=Memory(
            chip_bytes=question.chip.memory_bytes,
            text_weights=chip_bytes(params["text"]),
            vision_weights=chip_bytes(params["vision"]),
        ),
        obstacle=reason,
    )


def _compiled_plan(
    question: Question, num_chips: int, sizes: Sizes, lengths: Sequence[int]
) -> Plan:
    model, chip, itemsize = spread(question.model, num_chips), question.chip, question.itemsize
    backend = question.backend(num_chips)
    encoder_chips = num_chips // backend.num_lanes
    processor = question.processor_on(num_chips)
    check_sizes(backend, sizes.page_size, sizes.max_running, sizes.num_table_pages, question.dtype)
    whole = Lowering(model, sizes, question.dtype, backend)
    decode, extend = sizes.buckets.step_tokens(sizes.max_running), sizes.buckets.tokens[-1]
    lane = sizes.buckets.patches[-1]
    keys: list[Key] = [("language", decode), ("language", extend), ("encode", lane)]
    depths = shallow_depths(model)
    # a batch of decodes may fill the largest step: then one compile tells of both
    figures = _figures(question, model, sizes, backend, list(dict.fromkeys(keys)), depths)
    length = max((n for n in lengths if n <= sizes.max_model_len), default=sizes.max_model_len)
    rooms = tuple(_room(sizes, n) for n in lengths)
    running = min(sizes.max_running, _room(sizes, length).fit)

    def links(key: Key) -> float:
        found = figures[key]
        count = sum(found.collectives.values())
        return sums_floor(chip, num_chips, count, found.collective_bytes / max(1, count))

    floors = (
        decode_floor(
            model,
            chip,
            num_chips,
            num_requests=running,
            length=length,
            itemsize=itemsize,
            links=links(keys[0]),
        ),
        extend_floor(
            model, chip, num_chips, num_tokens=extend, itemsize=itemsize, links=links(keys[1])
        ),
        # rows that are gathered go out once, those that are summed twice
        encode_floor(
            model,
            chip,
            lane,
            itemsize,
            num_chips=encoder_chips,
            links=links(keys[2])
            if backend.split_encoder
            else sums_floor(chip, num_chips, 1, _row_bytes(model, sizes, itemsize)) / 2,
        ),
    )
    where = "all chips" if backend.split_encoder else "each chip"
    names = (
        f"decode {running} requests of {length} tokens",
        f"extend a prompt by {extend} tokens",
        f"encode a lane of {lane} patches on {where}",
    )
    memory = _memory(whole, figures, question)
    return Plan(
        model=question.name,
        topology=question.topology,
        num_devices=len(question.devices),
        tensor_parallel=num_chips,
        sizes=sizes,
        memory=memory,
        steps=tuple(
            Step(
                name=name,
                temporary_bytes=figures[key].temporary_bytes,
                collectives=figures[key].collectives,
                collective_bytes=figures[key].collective_bytes,
                floor=floor,
            )
            for name, key, floor in zip(names, keys, floors, strict=True)
        ),
        decoded=running,
        requests=rooms,
        pictures=tuple(_pictures(question, processor, sizes, encoder_chips)),
        max_pixels=processor.max_pixels,
        compile_seconds=_warm_up_seconds(sizes, figures, decode),
        layers=(depths[0].text, depths[1].text, model.text.num_layers),
        vision_layers=(depths[0].vision, depths[1].vision, model.vision.depth),
    )


def _figures(
    question: Question,
    model: ModelConfig,
    sizes: Sizes,
    backend: Backend,
    keys: Sequence[Key],
    depths: tuple[Depths, Depths],
) -> dict[Key, StepFigures]:
    """Compile each step twice, and extend the figures to the whole depth."""
    assert backend.mesh is not None, "a plan always has a mesh"
    compiled: list[dict[Key, CompiledStep]] = []
    different = list(dict.fromkeys(depths))
    bar = tqdm(
        total=len(keys) * len(different),
        desc="compile",
        unit="step",
        disable=not question.config.progress,
    )
    with bar:
        for depth in different:
            steps = Lowering(with_depths(model, depth), sizes, question.dtype, backend)
            compiled.append({})
            for key in keys:
                compiled[-1][key] = compile_step(steps, backend.mesh, key)
                bar.update()
    first, second = compiled[0], compiled[-1]
    layers = {
        "language": ((depths[0].text, depths[1].text), model.text.num_layers),
        "encode": ((depths[0].vision, depths[1].vision), model.vision.depth),
    }
    return {key: extended(first[key], second[key], *layers[key[0]]) for key in keys}


def _memory(whole: Lowering, figures: dict[Key, StepFigures], question: Question) -> Memory:
    text, vision = chip_bytes(whole.params["text"]), chip_bytes(whole.params["vision"])
    kv, arena = chip_bytes(whole.kv_pages), chip_bytes(whole.arena)
    state = chip_bytes(whole.state) + chip_bytes(whole.masks)
    language = max(f.argument_bytes for key, f in figures.items() if key[0] == "language")
    encode = max(f.argument_bytes for key, f in figures.items() if key[0] == "encode")
    layout = max(0, language - text - kv - arena - state) + max(0, encode - vision - arena)
    return Memory(
        chip_bytes=question.chip.memory_bytes,
        text_weights=text,
        vision_weights=vision,
        kv=kv,
        arena=arena,
        state=state,
        layout=layout,
        temporaries=max(f.temporary_bytes for f in figures.values()),
    )


def _row_bytes(model: ModelConfig, sizes: Sizes, itemsize: int) -> int:
    """Of the rows of all lanes; the compiled step gathers them a piece at a time."""
    rows = lane_rows(sizes.buckets.patches[-1], model.vision) * sizes.num_lanes
    return rows * model.text.row_width * itemsize


def _room(sizes: Sizes, length: int) -> Requests:
    pages = -(-length // sizes.page_size)
    fit = sizes.num_pages // pages if length <= sizes.max_model_len else 0
    return Requests(length=length, pages=pages, fit=fit)


def _pictures(
    question: Question, processor: Any, sizes: Sizes, num_chips: int
) -> Iterator[Picture]:
    vision = question.model.vision
    for width, height in _PICTURES:
        grid = processor.grid(height, width)
        used = lane_patches(grid, vision)
        if used <= sizes.buckets.patches[-1]:
            lane = sizes.buckets.lane_patches(used)
            yield Picture(
                width=width,
                height=height,
                tokens=processor.num_rows(grid),
                lane=lane,
                floor=encode_floor(
                    question.model, question.chip, lane, question.itemsize, num_chips=num_chips
                ),
            )


def _warm_up_seconds(sizes: Sizes, figures: dict[Key, StepFigures], decode: int) -> float:
    """Processor time of all executables.

    Rungs up to the decode step's cost what that one costs, the others what the largest does; those
    for penalties and given rows next to nothing.
    """
    cost = {key: found.compile_seconds for key, found in figures.items()}
    top = sizes.buckets.tokens[-1]
    language = [
        cost["language", decode] if rung <= decode else cost["language", top]
        for rung in sizes.buckets.tokens
    ]
    encode = cost["encode", sizes.buckets.patches[-1]] * len(sizes.buckets.patches)
    return sum(language) + encode
