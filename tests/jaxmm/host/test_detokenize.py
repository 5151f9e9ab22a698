"""Streamed text is the decoded text, and stop strings never leak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.detokenize import Detokenizer
from tests import chat_checkpoints as checkpoints

BYTES = [bytes([i]) for i in range(256)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return ChatTokenizer.from_checkpoint(directory)


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoTokenizer.from_pretrained(directory)


def stream(detokenizer, chunks):
    """Push each chunk; give the pieces, the last one from finish, and where it stopped."""
    pieces, stopped_at = [], None
    for i, chunk in enumerate(chunks):
        piece, stopped = detokenizer.push(chunk)
        pieces.append(piece)
        if stopped and stopped_at is None:
            stopped_at = i
    return [*pieces, detokenizer.finish()], stopped_at


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_together_are_the_decoding_of_all_ids(tokenizer, theirs, data):
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    chunks = data.draw(st.lists(st.lists(any_id, max_size=4), max_size=12))
    detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    pieces, _ = stream(detokenizer, chunks)
    ids = [i for chunk in chunks for i in chunk]
    assert "".join(pieces) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("sign", ["é", "図", "😀", "👩‍👩‍👧"])
@pytest.mark.parametrize("behind", ["", " "])
def test_no_character_is_given_out_unfinished(sign, behind):
    text = sign + behind
    pieces, _ = stream(Detokenizer(BYTES), [[byte] for byte in text.encode()])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_at_the_end_becomes_one_replacement_mark():
    pieces, _ = stream(Detokenizer(BYTES), [[byte] for byte in "a😀".encode()[:-1]])
    assert pieces == ["a", "", "", "", "\ufffd"]


def test_ids_beyond_the_vocabulary_and_hidden_ids_show_nothing():
    assert Detokenizer(BYTES, {65}).push([65, 66, 256, -1]) == ("B", False)


def test_a_stop_string_over_three_tokens_does_not_leak():
    table = [b"one", b" two ", b"STO", b"PHE", b"RE", b" three"]
    pieces, stopped_at = stream(Detokenizer(table, stop=["STOPHERE"]), [[i] for i in range(6)])
    assert pieces == ["one", " two ", "", "", "", "", ""]
    assert stopped_at == 4


def test_a_stop_string_at_the_very_start_leaves_nothing():
    assert stream(Detokenizer([b"STOP"], stop=["STOP"]), [[0]]) == (["", ""], 0)


def test_text_that_only_began_like_a_stop_string_is_given_out():
    table = [b"aSTO", b"X", b"STO"]
    assert stream(Detokenizer(table, stop=["STOP"]), [[0], [1], [2]]) == (
        ["a", "STOX", "", "STO"],
        None,
    )


def test_a_stop_string_may_overlap_its_own_false_start():
    # "aab" after "aaab": the second a begins the match that holds
    assert stream(Detokenizer(BYTES, stop=["aab"]), [[b] for b in b"xaaab"])[0][:3] == ["x", "", ""]
    assert Detokenizer(BYTES, stop=["aab"]).push(b"xaaab") == ("xa", True)


def test_the_stop_string_completed_first_wins_whatever_the_token_borders():
    for chunks in ([b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]):
        pieces, _ = stream(Detokenizer(BYTES, stop=["abcd", "bc"]), chunks)
        assert "".join(pieces) == "a"
    assert Detokenizer(BYTES, stop=["c", "abc"]).push(b"abc") == ("", True)


def first_stop(text, stops):
    """Plain search: the stop string that ends first, of several the longest."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    return text if not ends else text[: min(ends)[0] + min(ends)[1]]


letters = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(chunks=st.lists(st.text("ab", max_size=4), max_size=10), stops=st.lists(letters, max_size=3))
def test_stopping_equals_a_search_of_the_whole_text(chunks, stops):
    pieces, stopped_at = stream(
        Detokenizer(BYTES, stop=stops), [chunk.encode() for chunk in chunks]
    )
    text = "".join(chunks)
    assert "".join(pieces) == first_stop(text, stops)
    assert (stopped_at is not None) == any(s in text for s in stops)
