"""deploy/kubernetes: settings, ports, probes and names of one server, and KEDA's query, fit VeilMQ and each other.

Their shapes are held against the schemas of Kubernetes; KEDA's ScaledObject was checked by hand (docs/deploy.md).
"""

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from veilmq.admin import metrics
from veilmq.cli.sources import resolve
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
PORTS = {name: getattr(Settings(), name).port for name in ("sqs", "azure", "mns", "admin")}


def parts(name: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / name).read_text())}


ONE = parts("veilmq.yaml")
POD: Any = ONE["StatefulSet"]["spec"]["template"]["spec"]
CONTAINER: Any = POD["containers"][0]


def test_the_server_s_settings_are_ours() -> None:
    resolved = resolve({}, {each["name"]: each["value"] for each in CONTAINER["env"]})
    found = resolved.settings
    assert not resolved.misspelt
    assert {name: getattr(found, name).port for name in PORTS} == PORTS
    assert {each["name"]: each["containerPort"] for each in CONTAINER["ports"]} == PORTS
    assert POD["terminationGracePeriodSeconds"] >= 2 * found.shutdown_deadline_s + 5
    assert POD["initContainers"][0]["command"][-1] == str(found.credentials)
    assert ONE["StatefulSet"]["spec"]["replicas"] == 1


def test_only_a_server_with_others_beside_it_leaves_the_service_when_its_disk_is_full() -> None:
    """`/health/ready` is 503 then, but receives, deletes and purges work, and make room."""
    of_cluster = parts("cluster.yaml")["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    asked = [each["readinessProbe"]["httpGet"]["path"] for each in (CONTAINER, of_cluster)]
    assert asked == ["/health/live", "/health/ready"]
    for each in (CONTAINER, of_cluster):
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        assert min(each[probe]["timeoutSeconds"] for probe in probes) > 1  # the default
        # A migration, or a copy that is filled, would begin anew if it were ended.
        assert each["startupProbe"]["periodSeconds"] * each["startupProbe"]["failureThreshold"] >= 1800


def test_what_one_part_names_another_is() -> None:
    labels = ONE["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert ONE["Service"]["spec"]["selector"] == labels
    for kind, where in (
        ("StatefulSet", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        assert ONE[kind]["spec"][where]["matchLabels"] == labels
    assert ONE["StatefulSet"]["spec"]["serviceName"] == ONE["Service"]["metadata"]["name"]
    assert {each["name"]: each["port"] for each in ONE["Service"]["spec"]["ports"]} == PORTS
    data, admin = ONE["NetworkPolicy"]["spec"]["ingress"]
    assert {each["port"] for each in data["ports"]} == set(PORTS) - {"admin"}
    assert [each["port"] for each in admin["ports"]] == ["admin"]
    image = (KUBERNETES.parent / "Containerfile").read_text()
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert f"VOLUME {mounts['data']}\n" in image
    assert f"USER {POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}\n" in image


@for_each("name", ["veilmq.yaml", "cluster.yaml"])
def test_every_container_is_locked_down_and_writes_only_where_it_has_a_volume(name: str) -> None:
    found: Any = parts(name)["StatefulSet"]["spec"]
    pod = found["template"]["spec"]
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in found["volumeClaimTemplates"]}
    assert pod["securityContext"]["runAsNonRoot"]
    # Else the kubelet gives the data directory mode 02770 when a pod is made again, and the server refuses it.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert pod["automountServiceAccountToken"] is False
    for each in (*pod["containers"], *pod["initContainers"]):
        context = each["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        mounts = {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
        assert mounts.keys() <= volumes
        # Also where it serves: a new secret is copied from there for a reload.
        assert mounts["secret"] == str(Path(pod["initContainers"][0]["command"][-2]).parent)


@pytest.mark.slow
def test_the_manifests_have_the_shapes_of_kubernetes(tmp_path: Path) -> None:
    program = KUBERNETES.parents[1] / ".tools/kubernetes/bin/kubernetes-validate"
    assert program.exists(), "kubernetes-validate is missing: run `make setup-clients`"
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text((KUBERNETES / "veilmq.yaml").read_text().replace("readinessProbe:", "readinesProbe:"))
    command = [program, "--strict", "--kubernetes-version", "1.37", *KUBERNETES.glob("*.yaml"), misspelt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = {(level, file) for level, file, *_ in map(str.split, done.stdout.splitlines())}
    assert {file for level, file in said if level != "INFO"} == {str(KUBERNETES / "keda.yaml"), str(misspelt)}, done
    assert re.findall("WARN .* for kind (.*) with", done.stdout) == ["ScaledObject"]
    (wrong,) = re.findall("ERROR (.*)", done.stdout)
    assert "'readinesProbe' was unexpected" in wrong


@pytest.mark.slow
def test_probes_and_keda_s_query_have_answers(tmp_path: Path) -> None:
    with ExitStack() as ending:
        server = LocalServer(tmp_path)
        ending.callback(server.stop)
        server.connect("orders").send("one")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = CONTAINER[probe]["httpGet"]
            assert asked["port"] == "admin"
            assert httpx.get(server.admin_url + asked["path"]).status_code == 200
        scaled = parts("keda.yaml")
        assert scaled["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == scaled["Deployment"]["metadata"]["name"]
        query = scaled["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
        name, given = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", query).groups()  # type: ignore[union-attr]
        wanted = {label: value for label, _, value in re.findall(r'(\w+)(=~?)"([^"]*)"', given)}
        assert set(wanted) == {*metrics._QUEUE_LABELS, "state"}
        found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", httpx.get(f"{server.admin_url}/metrics").text, re.MULTILINE)
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', text)) | {"value": value} for text, value in found]
        counted = [
            each for each in labels if re.fullmatch(wanted["state"], each["state"]) and each["queue"] == wanted["queue"]
        ]
        assert sum(float(each["value"]) for each in counted) == 1
