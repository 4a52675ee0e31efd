"""Bodies of XML protocols: a queue whose `xml_body` is base64 stores them decoded, and reports that to readers."""

from base64 import b64encode
from hashlib import md5

from tests.support.contract.stage import TESTER, Stage, expect, refused, sending

from veilmq.model.commands import Peek, Receive
from veilmq.model.errors import MessageTooLarge, ParameterInvalid
from veilmq.model.outcomes import Extended, Received
from veilmq.model.settings.queue import XmlBody
from veilmq.testing.for_each import for_each

TEXT = "a <text> with \u00e9 and \U0001f600"
ENCODED = b64encode(TEXT.encode()).decode()


class TestXmlBodies:
    """Bodies from XML."""

    def test_a_body_is_stored_decoded(self, stage: Stage) -> None:
        queue = stage.create(xml_body=XmlBody.BASE64)
        stage.send(queue, ENCODED, from_xml=True)
        message = stage.take(queue)
        assert message.body == TEXT
        assert message.md5 == md5(TEXT.encode(), usedforsecurity=False).digest()

    def test_other_senders_and_other_queues_are_taken_at_their_word(self, stage: Stage) -> None:
        encoded, plain = stage.create("encoded", xml_body=XmlBody.BASE64), stage.create("plain")
        stage.send(encoded, ENCODED)
        stage.send(plain, ENCODED, from_xml=True)
        assert stage.take(encoded).body == stage.take(plain).body == ENCODED

    @for_each("body", ["?", "YQ", "YQ==\n", "YQ= =", "/w==", "AQ==", "\u00e9", "7aCA"], fresh="stage")
    def test_what_does_not_decode_is_refused_and_changes_nothing(self, stage: Stage, body: str) -> None:
        queue = stage.create(xml_body=XmlBody.BASE64)
        handle = stage.send(queue, TEXT, wants_handle=True).handle
        start = stage.following()
        assert refused(stage.do(sending(queue, body, from_xml=True)), ParameterInvalid).fields
        outcome = stage.extend(queue, handle, 0, rotate=True, body=body, size_bytes=1, md5=b"x" * 16, from_xml=True)
        refused(outcome, ParameterInvalid)
        assert stage.events(start) == []
        assert [message.body for message in stage.receive(queue, 10)] == [TEXT]

    def test_an_update_is_stored_decoded(self, stage: Stage) -> None:
        queue = stage.create(xml_body=XmlBody.BASE64)
        stage.send(queue, "old")
        message = stage.take(queue)
        outcome = stage.extend(queue, message.handle, 0, body=ENCODED, md5=b"x" * 16, size_bytes=1, from_xml=True)
        expect(outcome, Extended)
        assert stage.take(queue).body == TEXT

    def test_the_limit_is_of_what_is_stored(self, stage: Stage) -> None:
        queue = stage.create(xml_body=XmlBody.BASE64, message_bytes_max=1_024)
        for size, fits in ((1_024, True), (1_025, False)):
            outcome = stage.do(sending(queue, b64encode(b"x" * size).decode(), from_xml=True))
            assert isinstance(outcome, MessageTooLarge) is not fits

    @for_each("kind", list(XmlBody), fresh="stage")
    def test_readers_are_told(self, stage: Stage, kind: XmlBody) -> None:
        queue = stage.create(xml_body=kind)
        stage.send(queue)
        peeked = expect(stage.store.query(Peek(queue=queue, origin=TESTER), stage.now), Received)
        received = expect(stage.do(Receive(queue=queue, origin=TESTER)), Received)
        assert (peeked.xml_body, received.xml_body) == (kind, kind)
        assert len(peeked.messages) == len(received.messages) == 1
