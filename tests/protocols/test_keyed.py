"""HMAC from prepared states is HMAC."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.protocols import Keyed


@pytest.mark.parametrize("name", ["sha1", "sha256"])
@given(key=st.binary(max_size=130), texts=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_as_the_standard_library_has_it(name: str, key: bytes, texts: list[bytes]) -> None:
    keyed = Keyed(key, getattr(hashlib, name))
    for text in texts:
        assert keyed.digest(text) == hmac.digest(key, text, name)
