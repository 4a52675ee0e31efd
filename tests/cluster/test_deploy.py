"""The examples in deploy/: what they tell VeilMQ and each other fits. Containers are not run here."""

import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from psycopg.conninfo import make_conninfo
from tests.cluster.test_serving import Servers, ready, servers
from tests.support.postgres import Pair

from veilmq.cli.sources import resolve
from veilmq.cluster.postgres import Postgres
from veilmq.cluster.postgres.schema import admit, init
from veilmq.engine.directory import STATE_FORMAT
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

__all__ = ["servers"]
DEPLOY = Path(__file__).parents[2] / "deploy"
DEFAULTS = Settings()
PORTS = {name: getattr(DEFAULTS, name).port for name in ("sqs", "azure", "mns", "admin", "peer")}


def settings(environment: dict[str, str]) -> Settings:
    """What a server makes of it, which is checked as at a start."""
    resolved = resolve({}, environment)
    assert not resolved.misspelt
    return resolved.settings


COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.cluster.yaml").read_text())
SERVICES: Any = COMPOSE["services"]
PARTS: Any = {
    f"{each['kind']}/{each['metadata']['name']}": each
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "cluster.yaml").read_text())
}
STATEFUL: Any = PARTS["StatefulSet/veilmq"]["spec"]
POD: Any = STATEFUL["template"]["spec"]
CONTAINER: Any = POD["containers"][0]


class TestCompose:
    @for_each("name", ["one", "two"])
    def test_a_server_s_settings_are_ours(self, name: str) -> None:
        service = SERVICES[name]
        found = settings({**service["environment"], "POSTGRES_PASSWORD": "secret"})
        assert (found.cluster_name, str(found.advertise)) == (name, f"{name}:{PORTS['peer']}")
        assert {port: getattr(found, port).port for port in PORTS} == PORTS
        assert [int(port.split(":")[-1]) for port in service["ports"]] == [
            PORTS[port] for port in ("sqs", "azure", "mns")
        ]
        assert "healthcheck" not in service  # the image's
        assert int(service["stop_grace_period"].rstrip("s")) >= 2 * found.shutdown_deadline_s + 5
        assert service["volumes"][1].split(":")[1] == str(Path(str(found.credentials)).parent)
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
        # Docker Compose builds services in parallel, and builds of one tag may fail then.
        init = SERVICES["init"]
        assert init["build"]["args"] == {"EXTRAS": "cluster"}
        assert ("build" in service, service["pull_policy"], service["image"]) == (False, "never", init["image"])

    def test_what_one_part_names_another_is(self) -> None:
        for service in SERVICES.values():
            assert set(service.get("depends_on", ())) <= set(SERVICES)
            assert {each["source"] for each in service.get("configs", ())} <= set(COMPOSE["configs"])
            assert {each.split(":")[0] for each in service.get("volumes", ()) if each[0] != "."} <= set(
                COMPOSE["volumes"]
            )
        primary, standby = (COMPOSE["configs"][name]["content"] for name in ("primary", "standby"))
        (confirming,) = re.findall(r"synchronous_standby_names = '(\w+)'", primary)
        assert re.findall(r"application_name=(\w+)", standby) == [confirming]
        assert "@db1,db2/" in SERVICES["one"]["environment"]["VEILMQ_CLUSTER"]
        published = [port.split(":") for name in ("one", "two") for port in SERVICES[name]["ports"]]
        assert {address for address, _, _ in published} == {"127.0.0.1"}  # the servers have no TLS
        assert len(published) == len({port for _, port, _ in published})


class TestKubernetes:
    """Its shapes were checked with kubernetes-validate --strict, against 1.37."""

    def test_a_server_s_settings_are_ours(self) -> None:
        given = {each["name"]: each.get("value", "given") for each in CONTAINER["env"]}
        values = {name: value.replace("$(POD_NAME)", "veilmq-0") for name, value in given.items() if name != "POD_NAME"}
        found = settings({**values, "VEILMQ_CLUSTER": "postgresql://veilmq@postgres-rw/veilmq"})
        assert (found.cluster_name, str(found.advertise)) == ("veilmq-0", f"veilmq-0.veilmq-peers:{PORTS['peer']}")
        assert {name: getattr(found, name).port for name in PORTS} == PORTS
        assert {each["name"]: each["containerPort"] for each in CONTAINER["ports"]} == PORTS
        waits, before_s = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
        assert (waits, int(before_s) > 0) == ("sleep", True)  # until no node sends new connections any more
        assert POD["terminationGracePeriodSeconds"] >= int(before_s) + 2 * found.shutdown_deadline_s + 5
        assert POD["initContainers"][0]["command"][-1] == str(found.credentials)

    def test_what_one_part_names_another_is(self) -> None:
        labels = STATEFUL["template"]["metadata"]["labels"]
        assert STATEFUL["selector"]["matchLabels"] == labels
        budget = PARTS["PodDisruptionBudget/veilmq"]["spec"]
        assert budget["selector"]["matchLabels"] == labels
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"  # else a drain waits until one is ready
        for name in ("veilmq", "veilmq-peers"):
            service = PARTS[f"Service/{name}"]["spec"]
            assert service["selector"] == labels
            assert all(each["port"] == PORTS[each["targetPort"]] for each in service["ports"])
        peers = PARTS["Service/veilmq-peers"]["spec"]
        assert (peers["clusterIP"], peers["publishNotReadyAddresses"]) == ("None", True)
        assert STATEFUL["serviceName"] == "veilmq-peers"
        policy = PARTS["NetworkPolicy/veilmq"]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        admitted = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
        assert admitted.keys() == PORTS.keys()
        assert admitted["peer"] == [{"podSelector": {"matchLabels": labels}}]
        (once,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "cluster-init.yaml").read_text())
        init = once["spec"]["template"]["spec"]["containers"][0]
        assert (init["image"], init["args"]) == (CONTAINER["image"], ["cluster", "init"])
        assert init["securityContext"] == CONTAINER["securityContext"]
        assert all(each in CONTAINER["env"] for each in init["env"])
        volumes = {each["name"] for each in POD["volumes"]}
        volumes |= {each["metadata"]["name"] for each in STATEFUL["volumeClaimTemplates"]}
        for each in (CONTAINER, *POD["initContainers"]):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes

    @pytest.mark.slow
    def test_its_probes_are_there(self, servers: Servers) -> None:
        server = servers.start("one")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = CONTAINER[probe]["httpGet"]
            assert asked["port"] == "admin"
            assert httpx.get(server.admin + asked["path"]).status_code == 200
        assert ready(server)


@pytest.mark.slow
def test_the_script_makes_a_role_that_can_do_all(own_pair: Pair) -> None:
    """Where something is wrong it says so, and makes nothing."""
    programs, primary = own_pair.primary.programs, own_pair.primary

    def run(*given: str) -> str:
        command = [programs.program("psql"), "-X", *given, "-v", "name=mq", "-d", primary.dsn, "-f", "-"]
        script = (DEPLOY / "postgres.sql").read_text()
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        outcome = (0, "") if done.stdout.startswith("ready") else (3, "nothing was made\n")
        assert (done.returncode, done.stderr.partition("ERROR:  ")[2]) == outcome, done
        return done.stdout.strip()

    password = ("-v", "password=it's")

    primary.set("synchronous_standby_names", "")
    primary.set("fsync", "off")
    wrong = "no standby confirms commits: set synchronous_standby_names\nfiles are not synced: set fsync = on"
    assert run(*password) == wrong
    primary.set("synchronous_standby_names", "elsewhere")
    primary.set("fsync", "on")
    assert run(*password) == "none of the standbys in synchronous_standby_names is connected: start it"
    assert primary.query("select 1 from pg_roles where rolname = 'mq'") == []
    primary.set("synchronous_standby_names", own_pair.standby.name)
    assert run() == "the role needs a password: give -v password=SECRET"
    assert run(*password) == run(*password) == "ready: run veilmq cluster init"
    postgres = Postgres(make_conninfo(own_pair.dsn, user="mq", dbname="mq"))
    shard = init(postgres, state_format=STATE_FORMAT)
    with postgres.connect() as session:
        assert admit(session, shard.incarnation) == shard
        assert session.execute("select sync_state from pg_stat_replication").fetchall() == [("sync",)]
