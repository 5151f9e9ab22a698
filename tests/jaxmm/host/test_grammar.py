"""A grammar's masks: every path through them is a text of the grammar, and nothing else is."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmm.errors import GrammarError
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.grammar import Grammars, json_grammar
from tests import chat_checkpoints

MOST_TOKENS = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = chat_checkpoints.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return ChatTokenizer.from_checkpoint(directory)


def ends(tokenizer):
    return chat_checkpoints.eos_ids(tokenizer.token_bytes)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(
        tokenizer.token_bytes, tokenizer.special_ids, ends(tokenizer), tokenizer.encode_plain
    )


def allowed(matcher, tokenizer):
    """Ids that the mask allows, read bit by bit."""
    words = matcher.mask.tolist()
    return [i for i in range(tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1]


def random_walk(matcher, tokenizer, rng, banned=()):
    """Follow random allowed tokens; give the text, or None if it is not over in MOST_TOKENS."""
    text = b""
    for _ in range(MOST_TOKENS):
        if matcher.is_complete:
            return text.decode()
        token = int(rng.choice(allowed(matcher, tokenizer)))
        if token in ends(tokenizer):
            return text.decode()
        text += tokenizer.token_bytes[token]
        matcher.take(token, banned)
    return None


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 3, None]},
        {"const": '\u00e9\n"quoted"'},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-f]{2,3}$"},
    ]
)


def objects(inner):
    keys = st.lists(st.sampled_from(["a", "b c", "\u56f3", 'q"']), unique=True, min_size=1)
    return keys.flatmap(
        lambda names: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.fixed_dictionaries(dict.fromkeys(names, inner)),
                "required": st.sets(st.sampled_from(names)).map(sorted),
                "additionalProperties": st.just(False),
            }
        )
    )


def arrays(inner):
    return inner.map(lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 3})


def choices(inner):
    return st.lists(inner, min_size=2, max_size=3).map(lambda several: {"anyOf": several})


SCHEMAS = st.recursive(SCALARS, lambda s: objects(s) | arrays(s) | choices(s), max_leaves=5)


@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_whatever_is_sampled_under_a_schema_parses_and_validates(tokenizer, grammars, schema, seed):
    matcher = grammars.compile(json_grammar(schema)).start()
    text = random_walk(matcher, tokenizer, np.random.default_rng(seed))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


# llguidance holds U+007F to its escape, though JSON lets it stand as it is
written = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=5)


@given(
    value=st.recursive(
        st.booleans() | st.integers(-99, 99) | written,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(written, v, max_size=3),
        max_leaves=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_json_as_python_writes_it_can_be_said(tokenizer, grammars, value):
    """Compact, with spaces, and indented."""
    for style in ({"separators": (",", ":")}, {}, {"indent": 2}):
        matcher = grammars.compile(json_grammar(True)).start()
        for token in tokenizer.encode_plain(json.dumps(value, ensure_ascii=False, **style)):
            assert token in allowed(matcher, tokenizer)
            matcher.take(token)
        assert matcher.is_complete or set(ends(tokenizer)) <= set(allowed(matcher, tokenizer))


def test_no_special_token_but_the_end_is_ever_allowed(tokenizer, grammars):
    matcher = grammars.compile("start: /(.|\\n)*/").start()
    assert set(allowed(matcher, tokenizer)) & tokenizer.special_ids == set(ends(tokenizer))


def test_white_space_has_an_end(tokenizer, grammars):
    matcher = grammars.compile(json_grammar({"type": "object"})).start()
    [space] = tokenizer.encode_plain(" ")
    [brace] = tokenizer.encode_plain("{")
    matcher.take(brace)
    for _ in range(40):
        matcher.take(space)
    assert space not in allowed(matcher, tokenizer)


def test_a_copy_goes_its_own_way(tokenizer, grammars):
    base = grammars.compile('start: "ab" | "ac"')
    first, second = base.start(), base.start()
    for token in tokenizer.encode_plain("ab"):
        first.take(token)
    assert first.is_complete and not second.is_complete
    assert tokenizer.encode_plain("a")[0] in allowed(second, tokenizer)


def test_ids_held_back_are_not_allowed(tokenizer, grammars):
    [a] = tokenizer.encode_plain("a")
    matcher = grammars.compile("start: /a+/")
    assert set(allowed(matcher.start(), tokenizer)) >= {a}
    begun = matcher.start()
    begun.take(a, ends(tokenizer))
    assert not set(allowed(begun, tokenizer)) & set(ends(tokenizer))
    assert not begun.is_complete


def test_an_output_that_only_its_end_can_follow_is_complete_even_if_the_end_is_held_back(
    tokenizer, grammars
):
    [a] = tokenizer.encode_plain("a")
    matcher = grammars.compile("start: /a{1,2}/").start(ends(tokenizer))
    matcher.take(a, (*ends(tokenizer), a, *tokenizer.encode_plain("aa")))
    assert matcher.is_complete


def test_a_mask_without_a_token_is_an_error(tokenizer, grammars):
    [a] = tokenizer.encode_plain("a")
    with pytest.raises(GrammarError, match="no token"):
        grammars.compile('start: "a"').start([a])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "foo"}, "foo"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"not": {}}, "not"),
        ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        (False, "false"),
        ({"type": "string", "x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(grammars, schema, why):
    with pytest.raises(GrammarError, match=why):
        grammars.compile(json_grammar(schema))


@pytest.mark.parametrize(
    "grammar", ["", "start: (", "start: nothing", '{"grammars": []}', "x" * 9999]
)
def test_what_is_no_grammar_is_refused_in_one_line(grammars, grammar):
    with pytest.raises(GrammarError) as caught:
        grammars.compile(grammar)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_grammar_of_nothing_allows_the_end_alone(tokenizer, grammars):
    assert set(allowed(grammars.compile("start:").start(), tokenizer)) == set(ends(tokenizer))
    with pytest.raises(GrammarError, match="empty"):
        grammars.compile("start:").start(ends(tokenizer))


def test_what_is_no_schema_is_refused():
    with pytest.raises(GrammarError):
        json_grammar([1])  # type: ignore[arg-type]
    with pytest.raises(GrammarError):
        json_grammar({"enum": [{1, 2}]})


def test_a_model_without_an_end_token_has_no_grammars(tokenizer):
    without = Grammars(tokenizer.token_bytes, tokenizer.special_ids, (), tokenizer.encode_plain)
    with pytest.raises(GrammarError, match="ends an output"):
        without.compile('start: "a"')
