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
from veilmq.server.config.settings import Settings
from veilmq.testing.local import ServerProcess

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
PAGE = (ROOT / "docs" / "deploy.md").read_text()
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
    main.write_text((SYSTEMD / "veilmq.toml").read_text().replace("# queues", "queues"))
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


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(SYSTEMD / "veilmq.service")
    return found


def test_the_unit_goes_with_the_page_and_the_script_that_installs_it() -> None:
    service, script = unit()["Service"], (ROOT / "tools" / "install-service.sh").read_text()
    assert set(service["RestartPreventExitStatus"].split()) == {str(int(one)) for one in (Exit.USAGE, Exit.DIRECTORY)}
    interval_s, starts = (int(unit()["Unit"][name]) for name in ("StartLimitIntervalSec", "StartLimitBurst"))
    assert starts >= interval_s / int(service["RestartSec"]) + 10  # ten are left for whoever tries at 3 a.m.
    assert interval_s / starts > 2  # a start that the settings refuse takes less, also on a slow machine
    assert int(service["TimeoutStopSec"]) >= 2 * Settings().shutdown_deadline_s + 5
    assert int(service["LimitNOFILE"]) >= Settings().files_needed
    assert f"{Settings().files_needed:,} with the default" in PAGE
    program, _, flag, config = service["ExecStart"].split()
    assert flag == "--config"
    for path in (program.removesuffix("/bin/veilmq"), config, f"/var/lib/{service['StateDirectory']}"):
        assert f"`{path}`" in PAGE
        assert path in script
    by_hand = block("", "systemd-sysusers").splitlines()[:-1]
    of_script = [
        re.sub(r"^\[.*?\] \|\| ", "", line).replace('"$files/', "").replace('"', "") for line in script.splitlines()
    ]
    assert [line for line in by_hand if line not in of_script] == []
    assert f"u {service['User']} " in (SYSTEMD / "veilmq.sysusers").read_text()
    assert f"-o {service['User']} -g {service['Group']} -m {service['StateDirectoryMode'][1:]}" in script


def test_the_unit_leaves_the_boot_id_readable() -> None:
    """A cluster's lease-clock.json is of no use without it: see Memory of cluster/postgres/ownership.py."""
    service = unit()["Service"]
    assert service.get("ProcSubset", "all") == "all"
    assert service["ProtectKernelTunables"] == "true"


def test_the_sockets_of_systemd_are_ports_of_ours() -> None:
    listened = re.findall(r"^ListenStream=(\S+)$", (SYSTEMD / "veilmq.socket").read_text(), re.MULTILINE)
    assert listened == [str(getattr(Settings(), name)) for name in ("sqs", "azure", "mns")]


def test_systemd_takes_the_unit_and_finds_little_that_it_exposes(tmp_path: Path) -> None:
    """Its own words are on the page, for each systemd that was tried."""
    for name in ("veilmq.service", "veilmq.socket"):
        text = (SYSTEMD / name).read_text().replace("/opt/veilmq/bin/veilmq", "/bin/true")
        (tmp_path / name).write_text(text)
    verified = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "veilmq.service", tmp_path / "veilmq.socket"],
        capture_output=True,
        text=True,
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    looked = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", tmp_path / "veilmq.service"],
        capture_output=True,
        text=True,
    )
    found = re.search(r"Overall exposure level for veilmq.service: ([\d.]+) (\w+)", looked.stdout)
    assert found is not None, looked
    assert found[2] == "OK"
    (told,) = re.findall(r'says "OK", (.+?);', PAGE, re.DOTALL)
    assert found[1] in re.findall(r"([\d.]+) of 10\s+with", told), looked
