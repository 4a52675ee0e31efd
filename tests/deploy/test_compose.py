"""The compose files of deploy/: their settings are ours, and what was written for an emulator works unchanged.

Strategy: no container is run here. Each service's command runs with its environment and files in a network of its own,
where its name leads to an address of that network, as it would among the containers of a project.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from veilmq.cli.sources import resolve
from veilmq.server.auth import Hosts
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

DEPLOY = Path(__file__).parents[2] / "deploy"
CLIENTS = Path(__file__).with_name("emulator_clients.py")
CONFIGURATION = """
include classpath("application.conf")
node-address { protocol = http, host = elasticmq, port = 9324, context-path = "" }
queues { orders { defaultVisibilityTimeout = 7 seconds } }
"""
NETWORK = """
set -eu
mount --bind "$1/hosts" /etc/hosts
ip link set lo up
ip address add 10.77.0.1/32 dev lo
shift
exec "$@"
"""
RUN = """
set -eu
server=$1 port=$2 clients=$3 service=$4
shift 4
sh -c "$server" & pid=$!
"$1" - $port <<'WAIT'
import http.client, sys, time
for _ in range(1500):
    try:
        asked = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
        asked.request("GET", "/health/ready")
        if asked.getresponse().status == 200:
            break
    except OSError:
        time.sleep(0.02)
WAIT
code=0
"$1" "$clients" "$service" || code=$?
if [ "$service" = elasticmq ]; then  # its admin port is at all addresses, and VEILMQ_ADMIN says so
    veilmq send orders 'from a command' || code=$?
    veilmq doctor | grep -q ' is ready$' || code=81
    veilmq console | grep -q '^http://127.0.0.1:9325/' || code=82
    env -u VEILMQ_DATA veilmq queues list --token-file "$VEILMQ_DATA/admin-token" | grep -q orders || code=83
    env -u VEILMQ_ADMIN veilmq queues list | grep -q orders || code=84
fi
kill $pid
wait $pid || code=$?
exit $code
"""


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())["services"]
    return found


EMULATORS = services("compose.elasticmq.yaml") | services("compose.azurite-localstack.yaml")


def settings(service: dict[str, Any]) -> Settings:
    """What a server makes of the environment."""
    resolved = resolve({}, service["environment"])
    assert not resolved.misspelt
    return resolved.settings


def test_ours_is_hardened_and_keeps_its_data() -> None:
    (service,) = services("compose.yaml").values()
    found = settings(service)
    ports = {each.split(":")[-1] for each in service["ports"]}
    assert ports == {str(getattr(found, name).port) for name in ("sqs", "azure", "mns")}
    assert not any(getattr(found, name).loopback for name in ("sqs", "azure", "mns"))
    assert found.admin.loopback
    assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    assert int(service["stop_grace_period"].rstrip("s")) >= 2 * found.shutdown_deadline_s + 5
    data, keys = (each.split(":")[1] for each in service["volumes"])
    image = (DEPLOY / "Containerfile").read_text()
    assert f"VOLUME {data}\n" in image
    assert f"VEILMQ_DATA={data}/" in image
    # Were the file mounted by itself, no reload would see the one by which `veilmq keys new --into` replaces it.
    assert keys == str(Path(str(found.credentials)).parent)
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Containerfile")


def test_git_takes_no_keys_that_a_file_of_deploy_has_one_make() -> None:
    """Nor does the source distribution, which holds what git does not ignore."""
    told = {path for file in DEPLOY.rglob("*.yaml") for path in re.findall(r"--into (\S+)", file.read_text())}
    assert told
    ignored = subprocess.run(["git", "check-ignore", *told], cwd=DEPLOY.parent, capture_output=True, text=True)
    assert set(ignored.stdout.split()) == told


@for_each("name", list(EMULATORS))
def test_a_service_in_the_place_of_an_emulator_answers_to_its_name(name: str) -> None:
    service = EMULATORS[name]
    found = settings(service)
    assert found.dev_host[0] == name
    assert found.credentials is None
    assert str(found.data).startswith(service["volumes"][0].split(":")[1] + "/")


@pytest.mark.slow
@for_each("name", list(EMULATORS))
def test_what_was_written_for_an_emulator_works_unchanged(tmp_path: Path, name: str) -> None:
    service = EMULATORS[name]
    names = service["environment"]["VEILMQ_DEV_HOST"].replace(",", " ")
    if domain := service["environment"].get("VEILMQ_BASE_DOMAIN"):
        names = " ".join([names, domain, *(f"sqs.{region}.{domain}" for region in ("us-east-1", "eu-west-1"))])
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {names}\n")
    (tmp_path / "elasticmq.conf").write_text(CONFIGURATION)
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "veilmq"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m veilmq "$@"\n')
    program.chmod(0o755)
    words = [*service["entrypoint"], *service["command"]]
    if words[0] == "veilmq":
        command = " ".join(words)
    else:  # a script, in which $$ stands for $ and the mounted file is here
        command = words[-1].replace("$$", "$").replace("/opt/elasticmq.conf", str(tmp_path / "elasticmq.conf"))
    environment = os.environ | service["environment"] | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    environment |= {"VEILMQ_DATA": str(tmp_path / name)}
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    run = ["sh", "-c", RUN, "run", f"exec {command}" if words[0] == "veilmq" else command, "9325", str(CLIENTS), name]
    done = subprocess.run(
        ["unshare", "--net", "--mount", *own, "sh", "-c", NETWORK, "network", str(tmp_path), *run, sys.executable],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


PAGES = {
    "a page of another site": ({"Host": "elasticmq:9324", "Origin": "http://evil.example"}, 403),
    "a page below the name": ({"Host": "evil.elasticmq:9324"}, 403),
    "a name that leads here": ({"Host": "evil.example"}, 403),
    "an image or a link": ({"Host": "elasticmq:9324", "User-Agent": "Mozilla/5.0 (X11; rv:128.0) Gecko/20100101"}, 403),
    "a page at the name itself": ({"Host": "elasticmq:9324", "Origin": "http://elasticmq:9324"}, 403),
    "an application": ({"Host": "elasticmq:9324"}, 200),
    "in capitals": ({"Host": "ElasticMQ"}, 200),
    "by an address": ({"Host": "10.77.0.1:9324"}, 403),
}


def test_web_pages_do_not_reach_a_server_with_names(tmp_path: Path) -> None:
    """On every port but Azure's, where an account's CORS rules judge, names count and pages stay out."""
    server = ServerProcess(tmp_path, "--dev-host", "elasticmq,my_queue").start()
    try:
        for what, (headers, status) in PAGES.items():
            for url, target in ((server.sqs, "/?Action=ListQueues"), (server.mns, "/queues")):
                assert asked(url, target, headers)[0] == status, (what, url)
        for host, status in (("elasticmq", 200), ("my_queue:9325", 200), ("other", 403)):
            assert asked(server.admin, "/health/live", {"Host": host})[0] == status
        refusal = asked(server.sqs, "/?Action=ListQueues", {"Host": "other:9324"})[1]
        assert "not to other:9324: use 127.0.0.1 or localhost, or start it with --dev-host" in refusal
        page = asked(server.sqs, "/?Action=ListQueues", PAGES["a page of another site"][0])[1]
        assert "--cors-origins" in page
    finally:
        assert server.stop() == 0


AGENTS = {
    "Boto3/1.43.117 md/Botocore#1.43.117 ua/2.1 os/linux": True,
    "aws-sdk-js/3.1168.0 ua/2.1 os/linux lang/js md/nodejs#22.23.3": True,
    "azsdk-python-storage-queue/12.18.1 Python/3.11.7 (Linux)": True,
    "azsdk-js-storage-queue/12.32.0 core-rest-pipeline/1.24.0 Node/22.23.3": True,
    "aliyun-sdk-python/1.3.0(Linux/6.18/x86_64;3.11.7)": True,
    "aws-sdk-java/2.29.0 md/io#sync md/http#Apache": True,
    "curl/8.14.1": True,
    "": True,
    "Mozilla/5.0 (compatible; pycurl)": True,  # Celery's workers, which receive through kombu's own HTTP client
    "Mozilla/5.0 (compatible; urllib3)": True,  # the same in kombu 5.5
    "Mozilla/5.0 (Windows NT; Windows NT 10.0; en-US) WindowsPowerShell/5.1.19041.1": True,  # whose `curl` this is
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36": False,
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10.15; rv:128.0) Gecko/20100101 Firefox/128.0": False,
}
"""As those that run in tests/clients send them, without a language; Java's and PowerShell's are from their pages."""
LANGUAGES = {
    "node": True,
    "Deno/2.5.0": True,
    "App/1 CFNetwork/1568.200.51 Darwin/24.1.0": True,
    "Game/1.0": False,  # a window of a program that shows pages
    "Lynx/2.9.0dev.12 libwww-FM/2.14": False,
}


def test_sdks_get_in_without_a_mark_of_browsers_and_browsers_do_not() -> None:
    hosts = Hosts([], names=["elasticmq"])
    for host in (b"elasticmq:9324", b"localhost:9324"):
        for agents, more in ((AGENTS, {}), (LANGUAGES, {b"accept-language": b"*"})):
            for agent, taken in agents.items():
                headers = more | ({b"user-agent": agent.encode()} if agent else {})
                assert hosts.takes(host, headers) == taken, (host, agent)
    swift = {
        b"user-agent": b"aws-sdk-swift/1.5.0",
        b"accept-language": b"de-DE",
        b"authorization": b"AWS4-HMAC-SHA256 ",
    }
    assert hosts.takes(b"elasticmq", swift)
    assert not hosts.takes(b"elasticmq", {b"sec-fetch-site": b"same-origin"})


def asked(url: str, target: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status and text of the answer to a GET."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port or 0), timeout=10) as raw:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        raw.sendall(f"GET {target} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65_536), b"")).decode()
    return int(answer.split()[1]), answer
