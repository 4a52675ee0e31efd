"""Accounts of a credentials file, over TLS: two keys, bearer tokens of a configured issuer, user delegation."""

import datetime
import ipaddress
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
from azure.storage.queue import QueueClient, QueueSasPermissions, QueueServiceClient, generate_queue_sas
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from joserfc import jwt
from joserfc.jwk import ECKey

from veilmq.testing.local import ServerProcess

NAME, FIRST, SECOND = "examplename", "Zmlyc3Qga2V5IG9mIHRoZSBhY2NvdW50", "c2Vjb25kIGtleSBvZiB0aGUgYWNjb3VudA=="
ISSUER = "https://login.example/tenant/v2.0"
CREDENTIALS = """
[[account]]
id = "111111111111"
azure_name = "{name}"
azure_keys = ["{first}", "{second}"]
[[account.key]]
id = "AKSHOP"
secret = "of the shop"
[[account.identity]]
object_id = "owner"
[[account.identity]]
object_id = "peeker"
grants = [{{ actions = ["peek"], queues = ["orders*"] }}]
[[account]]
id = "222222222222"
azure_name = "othername"
azure_keys = ["b3RoZXI=", "b3RoZXIgdHdv"]
"""


class Bearer:
    """A credential of azure-core: a token of the issuer's for whoever it is."""

    def __init__(self, key: ECKey, **claims: Any) -> None:
        now = int(time.time())
        told = {"iss": ISSUER, "aud": "https://storage.azure.com", "oid": "owner", "tid": "tenant", "nbf": now - 5}
        header = {"alg": "ES256", "kid": key.kid}
        self._token = jwt.encode(header, told | {"exp": now + 600} | claims, key)
        self.asked: list[tuple[str, ...]] = []

    def get_token(self, *scopes: str, **ignored: Any) -> AccessToken:
        self.asked.append(scopes)
        return AccessToken(self._token, int(time.time()) + 600)


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return paths


class House:
    """A server with accounts and an issuer, over TLS."""

    def __init__(self, directory: Path) -> None:
        self.certificate, key = make_certificate(directory)
        self.issuer = ECKey.generate_key("P-256", {"kid": "one"})
        self.keys = directory / "keys.json"
        self.publish(self.issuer)
        self.credentials = directory / "credentials.toml"
        self.write(CREDENTIALS.format(name=NAME, first=FIRST, second=SECOND))
        self.server = ServerProcess(
            directory,
            *("--tls-cert", str(self.certificate), "--tls-key", str(key), "--credentials", str(self.credentials)),
            *("--azure-issuer", ISSUER, "--azure-issuer-keys", str(self.keys)),
        ).start()

    def publish(self, *keys: ECKey) -> None:
        """What the issuer's key set holds."""
        self.keys.write_text(json.dumps({"keys": [key.as_dict(private=False) for key in keys]}))

    def write(self, text: str) -> None:
        """The credentials file."""
        self.credentials.write_text(text)
        self.credentials.chmod(0o600)

    def service(self, credential: Any, name: str = NAME) -> QueueServiceClient:
        """A client of the account."""
        url = f"{self.server.azure}/{name}"
        return QueueServiceClient(url, credential=credential, retry_total=0, connection_verify=str(self.certificate))

    def shared_key(self, key: str, name: str = NAME) -> QueueServiceClient:
        return self.service({"account_name": name, "account_key": key}, name)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of the module."""
    there = House(tmp_path_factory.mktemp("house"))
    yield there
    assert there.server.stop() == 0


def code_of(raised: pytest.ExceptionInfo[HttpResponseError]) -> str:
    return str(getattr(raised.value.error_code, "value", raised.value.error_code))  # type: ignore[attr-defined]


def test_both_keys_and_no_other(house: House) -> None:
    house.shared_key(FIRST).create_queue("both")
    assert [each.name for each in house.shared_key(SECOND).list_queues(name_starts_with="both")] == ["both"]
    for client in (house.shared_key("bm8="), house.shared_key(FIRST, "nobody"), house.shared_key(FIRST, "othername")):
        with pytest.raises(ClientAuthenticationError) as raised:
            list(client.list_queues())
        assert code_of(raised) == "AuthenticationFailed"
    assert list(house.shared_key("b3RoZXI=", "othername").list_queues()) == [], "accounts do not see each other"


def test_a_token_of_the_issuer(house: House) -> None:
    service = house.service(Bearer(house.issuer))
    queue = service.create_queue("bearer")
    queue.send_message("x")
    queue.set_queue_access_policy({})
    assert queue.receive_message().content == "x"


def test_tokens_that_do_not_count(house: House) -> None:
    stranger = ECKey.generate_key("P-256", {"kid": "one"})
    for credential in (
        Bearer(stranger),
        Bearer(house.issuer, iss="https://elsewhere.example"),
        Bearer(house.issuer, aud="https://management.azure.com"),
        Bearer(house.issuer, exp=int(time.time()) - 1),
        Bearer(house.issuer, nbf=int(time.time()) + 3_600),
    ):
        with pytest.raises(ClientAuthenticationError) as raised:
            list(house.service(credential).list_queues())
        assert code_of(raised) == "InvalidAuthenticationInfo"
        assert len(credential.asked) == 2, "the challenge made the client try again"
    with pytest.raises(HttpResponseError) as unknown:
        list(house.service(Bearer(house.issuer, oid="nobody")).list_queues())
    assert code_of(unknown) == "AuthorizationPermissionMismatch"


def test_a_token_reaches_as_far_as_its_bearers_grants(house: House) -> None:
    house.shared_key(FIRST).create_queue("orders").send_message("x")
    queue = house.service(Bearer(house.issuer, oid="peeker")).get_queue_client("orders")
    assert [message.content for message in queue.peek_messages()] == ["x"]
    for use in (queue.receive_message, queue.clear_messages, queue.get_queue_properties):
        with pytest.raises(HttpResponseError) as raised:
            use()
        assert code_of(raised) == "AuthorizationPermissionMismatch"
    assert [message.dequeue_count for message in queue.peek_messages()] == [0]


def test_an_issuers_new_key_needs_no_restart(house: House) -> None:
    newer = ECKey.generate_key("P-256", {"kid": "two"})
    with pytest.raises(ClientAuthenticationError):
        list(house.service(Bearer(newer)).list_queues())
    house.publish(house.issuer, newer)
    assert list(house.service(Bearer(newer)).list_queues(name_starts_with="none")) == []
    house.keys.write_text("this is no key set")
    with pytest.raises(ClientAuthenticationError):
        list(house.service(Bearer(ECKey.generate_key("P-256", {"kid": "three"}))).list_queues())
    assert list(house.service(Bearer(newer)).list_queues(name_starts_with="none")) == []
    house.publish(house.issuer)


def test_user_delegation(house: House) -> None:
    house.shared_key(FIRST).create_queue("delegated")
    service = house.service(Bearer(house.issuer))
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    key = service.get_user_delegation_key(expiry=now + hour, start=now - hour / 4)
    assert (key.signed_oid, key.signed_tid, key.signed_service) == ("owner", "tenant", "q")
    sas = generate_queue_sas(
        NAME, "delegated", permission=QueueSasPermissions(add=True), expiry=now + hour, user_delegation_key=key
    )
    url = f"{house.server.azure}/{NAME}"
    with QueueClient(
        url, "delegated", credential=sas, retry_total=0, connection_verify=str(house.certificate)
    ) as queue:
        queue.send_message("x")
        with pytest.raises(HttpResponseError) as raised:
            queue.receive_message()
        assert code_of(raised) == "AuthorizationPermissionMismatch"


def test_a_reload_changes_keys_at_once_and_a_bad_file_nothing(house: House, reload: Any) -> None:
    text = CREDENTIALS.format(name=NAME, first=FIRST, second=SECOND)
    house.write("this is [not TOML")
    reload(house.server)
    list(house.shared_key(FIRST).list_queues())
    house.write(text.replace(FIRST, "bmV3ZXIga2V5"))
    reload(house.server)
    list(house.shared_key("bmV3ZXIga2V5").list_queues())
    list(house.shared_key(SECOND).list_queues())
    with pytest.raises(ClientAuthenticationError):
        list(house.shared_key(FIRST).list_queues())
    house.write(text)
    reload(house.server)
    list(house.shared_key(FIRST).list_queues())
