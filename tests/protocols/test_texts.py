"""What all protocols ask of a message's text, and the text of its id."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.messages import first_forbidden_character, id_text, is_plain


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
