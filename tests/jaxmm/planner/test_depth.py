"""Lines through two compiles, and what a compiled module says of its collectives."""

import dataclasses

from jaxmm.planner.compiler import CompiledStep
from jaxmm.planner.depth import Depths, extended, shallow_depths, with_depths
from tests.bench.step_cases import qwen2_5_vl_7b

_HLO = """
  %a = bf16[64,8]{1,0:T(8,128)} all-reduce(%x), metadata={op_name="jit(step)/mlp/dot"}
  %b = (f32[16]{0}, bf16[4,4]{1,0}) all-reduce(%x, %y), metadata={op_name="jit(step)/mlp/dot"}
  %c = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), metadata={op_name="jit(step)/embed"}
  %d = bf16[8,8]{1,0} all-gather-done(%c), metadata={op_name="jit(step)/embed"}
  %e = f32[128]{0} all-reduce(%x), metadata={op_name="jit(step)/sample/max"}
"""


def step(**changes: object) -> CompiledStep:
    return dataclasses.replace(
        CompiledStep(
            argument_bytes=100,
            output_bytes=60,
            temporary_bytes=30,
            aliased_bytes=50,
            hlo=_HLO,
            cpu_seconds=2.0,
        ),
        **changes,
    )


def test_collectives_are_counted_with_what_they_put_together() -> None:
    # 64*8 of two bytes; 16 of four and 16 of two; 8*8 of two, gathered; sampling left out
    assert step().collectives() == [
        ("all-reduce", 1024),
        ("all-reduce", 96),
        ("all-gather", 128),
    ]
    assert step().num_collectives == {"all-reduce": 2, "all-gather": 1}


def test_figures_go_on_along_the_line() -> None:
    more = _HLO + "\n  %f = bf16[64,8] all-reduce(%x)\n"
    second = step(argument_bytes=140, temporary_bytes=34, hlo=more, cpu_seconds=3.0)
    figures = extended(step(), second, (2, 4), 10)
    assert figures.argument_bytes == 100 + 4 * 40
    assert figures.temporary_bytes == 40 + 4 * 4  # with the results that are not in place
    assert figures.collectives == {"all-gather": 1, "all-reduce": 2 + 4}
    assert figures.collective_bytes == 1248 + 4 * 1024
    assert figures.compile_seconds == 6.0


def test_a_first_compile_that_took_longer_makes_the_whole_one_no_shorter() -> None:
    second = step(cpu_seconds=1.5)
    assert extended(step(), second, (2, 4), 80).compile_seconds == 1.5


def test_a_model_without_more_layers_is_compiled_as_it_is() -> None:
    figures = extended(step(), step(), (2, 2), 2)
    assert (figures.argument_bytes, figures.temporary_bytes) == (100, 40)


def test_shallow_models_keep_both_kinds_of_layers() -> None:
    model = qwen2_5_vl_7b()
    first, second = shallow_depths(model)
    assert (first, second) == (Depths(2, 2), Depths(4, 4))
    shallow = with_depths(model, second)
    assert (shallow.text.num_layers, shallow.vision.depth) == (4, 4)
    assert len(shallow.vision.full_attention_layers) == 1
    assert shallow_depths(qwen2_5_vl_7b(1, 3)) == (Depths(1, 2), Depths(1, 3))


def test_levels_of_deepstack_stay() -> None:
    model = qwen2_5_vl_7b()
    vision = dataclasses.replace(model.vision, deepstack_layers=(8, 16, 24))
    text = dataclasses.replace(model.text, deepstack_levels=3, dense_layers=(1, 20))
    model = dataclasses.replace(model, vision=vision, text=text)
    first, second = shallow_depths(model)
    assert (first.text, second.text) == (4, 6)
    shallow = with_depths(model, first)
    assert shallow.vision.deepstack_layers == (0, 1, 2)
    assert shallow.text.row_width == model.text.row_width
    assert shallow.text.dense_layers == (1,)
