"""One step's buffer: every field against what the sequences say, worked out one token at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.host.arena import Arena
from jaxmm.host.batch import MAX_BANNED, StepBatch, StepLayout, build_batch, sampled_rows
from jaxmm.host.item import Span
from jaxmm.host.plan import DecodeRow, ExtendChunk, Plan
from jaxmm.host.sequence import Sequence
from jaxmm.host.staging import RowKey
from jaxmm.request import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.jaxmm.host.prompts import PLACEHOLDER, Picture, make_prompt

NUM_IDS = 500
PAGE = 4
LAYOUT = StepLayout(num_tokens=32, num_sequences=8, num_table_pages=6, num_mask_words=3)
EOS = (2, 3)


def running(*parts, slot, pages, outputs=(), delta=0, **sampling):
    """A sequence that holds pages and a slot, and the rows of all its pictures."""
    prompt = dataclasses.replace(make_prompt(*parts), delta=delta)
    sequence = Sequence(
        request_id=f"r{slot}",
        prompt=prompt,
        sampling=SamplingParams(**sampling),
        seed=(slot, -slot),
    )
    sequence.slot = slot
    sequence.pages.extend(np.array(pages, np.int32))
    sequence.output_ids = list(outputs)
    arena = Arena(64, 2)
    for index, item in enumerate(prompt.items):
        sequence.leases[index] = arena.reserve(RowKey.of(item, ""))
    return sequence


def plan_of(decodes=(), extends=()):
    return Plan(decodes=tuple(decodes), extends=tuple(extends), encodes=(), missing_features=())


def build(plan, layout=LAYOUT):
    return build_batch(plan, layout, page_size=PAGE, num_ids=NUM_IDS, eos_ids=EOS)


@pytest.fixture
def mixed():
    """Two decodes and two chunks, the first cut inside its picture."""
    long = running([5] * 14, slot=3, pages=[9, 1, 7, 2, 8], outputs=[6, 6], delta=-3)
    short = running([5] * 5, slot=0, pages=[4, 3], temperature=0.5, seed=1)
    cut = running([4, 4], Picture("cat", 6), [8], slot=6, pages=[10, 11, 12])
    ends = running([1, 2, 3], slot=1, pages=[13], presence_penalty=0.5, logit_bias={7: 1.0})
    plan = plan_of(
        [DecodeRow(long, 15), DecodeRow(short, 6)],
        [ExtendChunk(cut, Span(1, 5), False), ExtendChunk(ends, Span(0, 3), True)],
    )
    return plan, (long, short, cut, ends)


def test_counts_say_how_much_is_real(mixed):
    batch = build(mixed[0])
    names = ("num_tokens", "num_decodes", "num_sequences", "num_samples")
    assert [int(batch[name]) for name in names] == [9, 2, 4, 3]
    assert int(batch["num_ids"]) == NUM_IDS


def test_decodes_feed_what_their_slot_sampled_last(mixed):
    batch = build(mixed[0])
    assert batch["feed_T"].tolist() == [3, 0] + [-1] * 30


def test_extends_read_their_ids_and_their_own_rows(mixed):
    plan, (_, _, cut, _) = mixed
    batch = build(plan)
    assert batch["ids_T"][2:9].tolist() == [4, *[PLACEHOLDER] * 3, 1, 2, 3]
    slots = cut.leases[0].slots[:3].tolist()
    assert batch["row_T"].tolist() == [-1, -1, -1, *slots, -1, -1, -1] + [-1] * 23


def test_positions_are_the_prompts_and_then_index_plus_delta(mixed):
    batch = build(mixed[0])
    assert batch["positions_AT"][:, :9].tolist() == [[12, 6, 1, 2, 3, 4, 0, 1, 2]] * 3


def test_every_token_is_written_to_its_place_in_its_pages(mixed):
    # token 15 of the first: page index 3, place 3; token 6 of the second: page index 1, place 2
    expected = [2 * 4 + 3, 3 * 4 + 2, 41, 42, 43, 44, 52, 53, 54]
    assert build(mixed[0])["kv_slot_T"][:9].tolist() == expected


def test_sequences_are_described_in_order(mixed):
    batch = build(mixed[0])
    assert batch["starts_B"][:4].tolist() == [0, 1, 2, 6]
    assert batch["counts_B"][:4].tolist() == [1, 1, 4, 3]
    assert batch["lengths_B"][:4].tolist() == [16, 7, 5, 3]
    assert batch["tables_BQ"][0].tolist() == [9, 1, 7, 2, 8, 0]
    assert batch["tables_BQ"][3].tolist() == [13, 0, 0, 0, 0, 0]


def test_rows_to_sample_are_the_decodes_and_the_chunks_that_end(mixed):
    plan, (long, short, _, ends) = mixed
    batch = build(plan)
    assert batch["sample_token_B"][:3].tolist() == [0, 1, 8]
    assert batch["sample_slot_B"][:3].tolist() == [3, 0, 1]
    assert [(row.sequence, row.output_index) for row in sampled_rows(plan)] == [
        (long, 2), (short, 2), (ends, 0)
    ]  # fmt: skip


def test_sampling_columns_are_those_of_the_sampled_rows(mixed):
    batch = build(mixed[0])
    assert [int(batch[f"any_{name}"]) for name in ("random", "penalty", "logprobs")] == [1, 1, 0]
    assert batch["temperature_B"][:3].tolist() == [0.0, 0.5, 0.0]
    assert batch["seed_B2"][:3].tolist() == [[3, -3], [0, 0], [1, -1]]
    assert batch["draw_B"][:3].tolist() == [2, 2, 0]
    assert batch["presence_B"][:3].tolist() == [0.0, 0.0, 0.5]
    assert batch["repetition_B"][:3].tolist() == [1.0, 1.0, 1.0]
    assert batch["num_bias_B"][:3].tolist() == [0, 0, 1]


def test_plain_greedy_rows_ask_for_no_dearer_path():
    batch = build(plan_of([DecodeRow(running([5] * 3, slot=0, pages=[0]), 3)]))
    assert not any(int(batch[f"any_{name}"]) for name in ("random", "penalty", "logprobs"))


@pytest.mark.parametrize(("token_index", "banned"), [(4, True), (5, True), (6, False)])
def test_min_tokens_ban_ends_until_there_are_so_many(token_index, banned):
    # prompt of 4: the row at token 4 samples output 1; three outputs are asked for
    sequence = running([5] * 4, slot=0, pages=[0, 1], min_tokens=3, stop_token_ids=(7, 8))
    batch = build(plan_of([DecodeRow(sequence, token_index)]))
    assert int(batch["any_penalty"]) == banned
    count = int(batch["num_banned_B"][0])
    assert batch["banned_BX"][0, :count].tolist() == ([*EOS, 7, 8] if banned else [])


def test_most_stop_ids_and_end_ids_have_room():
    stops = tuple(range(10, 10 + MAX_STOP_TOKEN_IDS))
    sequence = running([5], slot=0, pages=[0], min_tokens=2, stop_token_ids=stops)
    plan = plan_of(extends=[ExtendChunk(sequence, Span(0, 1), True)])
    batch = build_batch(
        plan, LAYOUT, page_size=PAGE, num_ids=NUM_IDS, eos_ids=tuple(range(100, 120))
    )
    assert int(batch["num_banned_B"][0]) == MAX_BANNED
    assert set(stops) <= set(batch["banned_BX"][0].tolist())


def test_chunk_that_goes_on_into_the_output_reads_known_ids():
    sequence = running([5] * 3, slot=2, pages=[0, 1], outputs=[11, 12, 13], delta=4)
    batch = build(plan_of(extends=[ExtendChunk(sequence, Span(2, 6), True)]))
    assert batch["ids_T"][:4].tolist() == [5, 11, 12, 13]
    assert batch["positions_AT"][0, :4].tolist() == [2, 7, 8, 9]
    assert [row.output_index for row in sampled_rows(plan_of(
        extends=[ExtendChunk(sequence, Span(2, 6), True)]
    ))] == [3]  # fmt: skip


@given(num_tokens=st.integers(1, 300), num_sequences=st.integers(1, 40), pages=st.integers(1, 40))
def test_fields_fill_the_buffer_without_overlap(num_tokens, num_sequences, pages):
    layout = StepLayout(num_tokens, num_sequences, pages, 2)
    owner = np.zeros(layout.size, np.int32)
    for offset, shape in layout.fields.values():
        owner[offset : offset + int(np.prod(shape, dtype=int))] += 1
    assert (owner == 1).all()


def test_views_write_into_the_one_buffer():
    batch = StepBatch(LAYOUT)
    batch["temperature_B"][1] = 0.5
    offset, _ = LAYOUT.fields["temperature_B"]
    assert batch.buffer[offset + 1] == np.float32(0.5).view(np.int32)
    assert np.count_nonzero(batch.buffer) == 1


def test_masks_stand_in_the_order_of_the_sampled_rows(mixed):
    class Following:
        """A matcher whose tokenizer is smaller than the embedding."""

        mask = np.array([5, 1 << 31], np.uint32)

    plan, *_ = mixed
    rows = sampled_rows(plan)
    assert build(plan).allowed_BO is None and not build(plan)["any_masked"]
    rows[1].sequence.matcher = Following()
    batch = build(plan)
    assert batch["any_masked"] and batch.allowed_BO.shape == (8, 3)
    everything = (1 << 32) - 1
    assert batch.allowed_BO[0].tolist() == [everything] * 3
    assert batch.allowed_BO[1].tolist() == [5, 1 << 31, 0]
    assert batch.allowed_BO[2].tolist() == [everything] * 3
