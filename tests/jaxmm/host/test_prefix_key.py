"""Two prompts share KV exactly as far as ids and identities agree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.host.prefix_key import PrefixKey, num_shared
from tests.jaxmm.host.prompts import Picture, make_prompt


def key_of(*parts, salt=""):
    prompt = make_prompt(*parts)
    return PrefixKey.of(prompt.cache_ids, prompt.items, salt)


def token_contents(prompt):
    """One value a token: its cache id and, in a picture, the identity."""
    return [
        (int(token), prompt.items[i].identity if i >= 0 else b"")
        for token, i in zip(prompt.cache_ids, prompt.item_index, strict=True)
    ]


def test_equal_hashes_of_different_pictures_share_only_what_is_before_them():
    cat, dog = (Picture(name, 6, forged=True) for name in ("cat", "dog"))
    a, b = key_of([1, 2, 3], cat, [4]), key_of([1, 2, 3], dog, [4])
    np.testing.assert_array_equal(a.cache_ids, b.cache_ids)
    assert num_shared(a, b) == 3


def test_typed_sentinels_are_not_a_picture():
    picture = make_prompt(Picture("cat", 4))
    typed = PrefixKey.of(picture.cache_ids, (), "")
    assert num_shared(PrefixKey.of(picture.cache_ids, picture.items, ""), typed) == 0


def test_tenants_share_nothing():
    assert num_shared(key_of([1, 2], salt="a"), key_of([1, 2], salt="b")) == 0


PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(1, 2), min_size=1, max_size=4),
        st.builds(
            Picture,
            st.sampled_from(["a", "b"]),
            st.integers(1, 6),
            st.just(True),
            st.booleans(),
        ),
    ),
    max_size=4,
)


@given(PARTS, PARTS)
def test_shared_tokens_are_those_of_equal_content(a, b):
    left, right = token_contents(make_prompt(*a)), token_contents(make_prompt(*b))
    equal = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
        min(len(left), len(right)),
    )
    assert num_shared(key_of(*a), key_of(*b)) == equal
