"""What docs/deploy.md tells to type and to write into files does what it says: the certificates, the TOML, the unit.

Strategy: the blocks are read off the page. The certificate recipe runs as it stands, and its result serves; Python from
3.13 on asks of an authority what older ones did not (VERIFY_X509_STRICT), so that is asked here too.
"""

import configparser
import re
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt

from veilmq.cli.failures import Exit
from veilmq.cli.sources import resolve
from veilmq.server.auth import Credentials
from veilmq.server.config import queues_file
from veilmq.testing.local import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
BLOCKS = [
    (token.info.strip(), token.content)
    for token in MarkdownIt().parse(PAGE)
    if token.type in {"fence", "code_block"}
]  # fmt: skip


def block(language: str, having: str) -> str:
    """The one block of that language with that text."""
    (found,) = [text for info, text in BLOCKS if info == language and having in text]
    return found


def test_the_certificates_of_the_recipe_serve(tmp_path: Path) -> None:
    done = subprocess.run(["sh", "-eu", "-c", block("", "openssl req")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = ["--tls-cert", str(tmp_path / "mq.pem"), "--tls-key", str(tmp_path / "mq.key")]
    server = ServerProcess(tmp_path, *files).start()
    try:
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        trusting.verify_flags |= ssl.VERIFY_X509_STRICT
        where = urlsplit(server.sqs)
        with (
            socket.create_connection((where.hostname, where.port), timeout=20) as plain,
            trusting.wrap_socket(plain, server_hostname="mq.example.com") as secure,
        ):
            assert secure.version() in {"TLSv1.2", "TLSv1.3"}
    finally:
        assert server.stop() == 0


def test_the_files_are_taken(tmp_path: Path) -> None:
    main, keys, azure, queues = (
        tmp_path / name for name in ("veilmq.toml", "credentials.toml", "azure.toml", "queues.toml")
    )
    main.write_text(block("toml", "log_format ="))
    settings = resolve({"config": str(main)}, {}).settings
    assert (str(settings.data), settings.log_format) == ("/var/lib/veilmq", "json")
    assert (settings.credentials, settings.queues) == (
        Path("/etc/veilmq/credentials.toml"),
        Path("/etc/veilmq/queues.toml"),
    )
    keys.write_text(block("toml", "AKWORKER").replace('"..."', '"a secret of enough characters"'))
    azure.write_text(block("toml", "azure_keys").replace('"..."', '"c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"'))
    queues.write_text(block("toml", "[[queue]]"))
    for path in (keys, azure):
        path.chmod(0o600)
    assert Credentials(azure).find_account("examplename") is not None
    accounts = Credentials(keys).accounts
    names = [each.create.queue.name for each in queues_file.read(queues, accounts, checks=True).queues]
    assert names == ["orders-dead", "orders"]


def test_the_unit_goes_with_the_page() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block("ini", "[Service]"))
    service = unit["Service"]
    assert set(service["RestartPreventExitStatus"].split()) == {str(int(one)) for one in (Exit.USAGE, Exit.DIRECTORY)}
    program = service["ExecStart"].split()[0]
    assert f"{program.removesuffix('/bin/veilmq')}/bin/pip install" in PAGE
    config = re.search(r"--config (\S+)", service["ExecStart"])
    assert config is not None
    assert f"# {config[1]}\n" in PAGE
