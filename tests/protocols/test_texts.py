"""What all protocols ask of a message's text and of a document, and the text of an id."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.messages import first_forbidden_character, id_text, is_plain
from veilmq.protocols import DocumentInvalid, read_document
from veilmq.testing.for_each import for_each


def xml_carries(character: str) -> bool:
    """Production 2 of XML 1.0."""
    code = ord(character)
    return code in {0x9, 0xA, 0xD} or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000


@given(st.text(st.characters(exclude_categories=())) | st.text(st.characters(max_codepoint=0x82)))
def test_the_first_character_that_xml_cannot_carry(text: str) -> None:
    refused = [index for index, character in enumerate(text) if not xml_carries(character)]
    assert first_forbidden_character(text) == (refused[0] if refused else None)


def test_plain_are_the_printable_ones_of_ascii_tabs_and_line_ends() -> None:
    plain = bytes(byte for byte in range(256) if is_plain(bytes([byte])))
    assert plain == b"\t\n\r" + bytes(range(0x20, 0x7F))
    assert is_plain(plain)
    assert is_plain(b"")
    assert not is_plain(plain + b"\0")


@given(st.binary(min_size=16, max_size=16))
def test_the_text_of_an_id(message_id: bytes) -> None:
    assert id_text(message_id) == str(UUID(bytes=message_id))


@for_each(
    ("count", "said"), [(32, None), (33, "too many elements or attributes"), (20_000, "a tag or a comment is too long")]
)
def test_an_element_has_few_attributes(count: int, said: str | None) -> None:
    """Of 400,000, which are 5 MB, expat made names and values for three seconds before it called."""
    document = b"<top><text>%b</text><many %b/></top>" % (
        b"x" * 200_000,
        b" ".join(b"a%d='>'" % n for n in range(count)),
    )
    if said is None:
        assert len(read_document(document, 8, 8).children[0].raw) == 200_000
        return
    with pytest.raises(DocumentInvalid, match=said):
        read_document(document, 8, 8)
