"""Ray's cluster file and the Kubernetes manifests, against the schemas that their readers have."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import ray.autoscaler
import yaml
from ray.autoscaler._private import util

from baton import config

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.37"
RAY_CLUSTER = {
    "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs", "authOptions",
}  # fmt: skip
"""Fields of a RayClusterSpec, and below those of its groups, by KubeRay's API reference and types."""
HEAD = {"template", "headService", "enableIngress", "rayStartParams", "serviceType"}
WORKERS = {
    "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds",
    "rayStartParams", "template", "scaleStrategy", "numOfHosts",
}  # fmt: skip


def ray_cluster_file() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / "manifests" / "ray" / "cluster.yaml").read_text())


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "manifests" / "kubernetes" / "baton.yaml").read_text()))


def manifest(kind: str) -> dict[str, Any]:
    (match,) = [each for each in manifests() if each["kind"] == kind]
    return match


def pods() -> list[dict[str, Any]]:
    spec = manifest("RayCluster")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]} for group in groups]


# --- Ray's cluster launcher -------------------------------------------------------------------------------------------


def test_rays_launcher_takes_the_cluster_file() -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(ray_cluster_file())
    prepared = util.prepare_config(ray_cluster_file())
    util.validate_config(prepared)
    assert prepared["max_workers"] == len(ray_cluster_file()["provider"]["worker_ips"])


def test_every_ray_of_the_cluster_file_asks_for_its_token() -> None:
    file = ray_cluster_file()
    assert "~/.ray/auth_token" in file["file_mounts"]
    commands = [*file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_built_in_objects_and_pods_fit_the_strict_schemas() -> None:
    built_in = [each for each in manifests() if each["kind"] != "RayCluster"]
    assert len(built_in) == 5
    for each in (*built_in, *pods()):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_ray_cluster_has_fields_that_kuberay_knows() -> None:
    cluster = manifest("RayCluster")
    spec = cluster["spec"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert spec.keys() <= RAY_CLUSTER
    assert {"rayStartParams", "template"} <= spec["headGroupSpec"].keys() <= HEAD
    assert spec["authOptions"] == {"mode": "token"}
    for group in spec["workerGroupSpecs"]:
        assert {"groupName", "rayStartParams", "template"} <= group.keys() <= WORKERS
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_cluster_waits_for_all_of_its_pods_and_names_the_images_ray() -> None:
    spec = manifest("RayCluster")["spec"]
    head = pods()[0]["spec"]["containers"][0]
    environment = {one["name"]: one["value"] for one in head["env"]}
    assert int(environment["BATON_NODES"]) == 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert spec["rayVersion"] == pinned[1]


def test_the_clusters_doors_need_tls_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(manifest("ConfigMap")["data"]["baton.yaml"])
    settings = config.load(file)
    assert settings.api.require_keys
    assert not settings.api.insecure
    mounts = {mount["name"]: mount["mountPath"] for mount in pods()[0]["spec"]["containers"][0]["volumeMounts"]}
    assert settings.tls.cert_file == f"{mounts['tls']}/tls.crt"
    assert settings.tls.key_file == f"{mounts['tls']}/tls.key"


def test_no_manifest_holds_a_secret_and_no_pod_more_rights_than_it_needs() -> None:
    assert not [each for each in manifests() if each["kind"] == "Secret"]
    for pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert "memory" in container["resources"]["limits"]
