"""Checks the manifests of ops/kubernetes and the chart of ops/helm. scripts/test-charts calls it.

The objects are checked against Kubernetes' own schemas, and against each other: what a reader would otherwise notice in
the cluster. The chart's rendering is compared with tests/fixtures/charts.
"""

import argparse
import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CHART, MANIFESTS, GOLDEN = ROOT / "ops/helm/kvrouted", ROOT / "ops/kubernetes", ROOT / "tests/fixtures/charts"
#: The oldest that has containers that restart with the pod, and a new one.
VERSIONS = ["1.29", "1.37"]
#: Kinds of which the package has no schema.
WITHOUT_SCHEMA = {"InferencePool"}
#: May run as root: it hands the folder of the host to the daemon's user.
ROOT_CONTAINERS = {"folder"}
#: Values that the chart must refuse.
BAD_VALUES = [
    {"layout": "operator"}, {"replicas": 2}, {"replicas": 0}, {"sandbox": True}, {"unknown": 1},
    {"pool": {"targetPorts": []}}, {"layout": "sidecar"}, {"layout": "daemonset", "static": {"model": "m"}},
    {"layout": "sidecar", "static": {"model": "m", "engines": [{"id": 1, "url": "vllm", "endpoint": "tcp://a:1"}]}},
    {"metrics": {"enabled": "yes"}}, {"resources": {"gateway": {"limits": None}}},
]

problems: list = []
skipped: list = []
counts = {"objects": 0, "renderings": 0}


def problem(where: str, text: str):
    problems.append(f"{where}: {text}")


def merged(base, over):
    """As Helm lays values over others: maps are merged, anything else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return copy.deepcopy(over)
    return {key: merged(base[key], over[key]) if key in base and key in over else copy.deepcopy(over.get(key, base.get(key)))
            for key in [*base, *(key for key in over if key not in base)]}


def labels_fit(selector: dict, labels: dict) -> bool:
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def check_schema(where: str, thing: dict):
    if thing["kind"] in WITHOUT_SCHEMA:
        skipped.append(f"the schema of {thing['kind']}: the package of schemas has none")
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(copy.deepcopy(thing), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problem(where, f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}")


def check_pod(where: str, pod: dict, things: list):
    whole = pod.get("securityContext", {})
    if not whole.get("runAsNonRoot") or whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        problem(where, "the pod needs runAsNonRoot and the seccomp profile RuntimeDefault")
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    configs = {thing["metadata"]["name"]: thing for thing in things if thing["kind"] == "ConfigMap"}
    mounted = set()
    for volume in volumes.values():
        if "configMap" in volume and volume["configMap"]["name"] not in configs:
            problem(where, f"there is no ConfigMap {volume['configMap']['name']}")
    for container in pod["containers"] + pod.get("initContainers", []):
        name, context = f"{where}, container {container['name']}", container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or not context.get("readOnlyRootFilesystem"):
            problem(name, "it needs allowPrivilegeEscalation: false and readOnlyRootFilesystem: true")
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            problem(name, "it must drop all capabilities")
        if (context.get("runAsUser") == 0) != (container["name"] in ROOT_CONTAINERS):
            problem(name, "only the container that hands the folder over runs as root")
        if "memory" not in container.get("resources", {}).get("limits", {}):
            problem(name, "without a limit of memory its budget is that of the node")
        for mount in container.get("volumeMounts", []):
            mounted.add(mount["name"])
            if mount["name"] not in volumes:
                problem(name, f"there is no volume {mount['name']}")
        if container["name"] in ("gateway", "daemon") and "livenessProbe" not in container:
            problem(name, "it needs a liveness probe")
        check_command(name, container, volumes, configs)
    for unused in volumes.keys() - mounted:
        problem(where, f"no container mounts the volume {unused}")


def check_command(where: str, container: dict, volumes: dict, configs: dict):
    """The file that a container reads is in its ConfigMap, at that path."""
    words = container.get("command", []) + container.get("args", [])
    if "--config" not in words:
        return
    path = pathlib.PurePosixPath(words[words.index("--config") + 1])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volume = volumes.get(mounts.get(str(path.parent)), {})
    config = configs.get(volume.get("configMap", {}).get("name"), {"data": {}})
    if path.name not in config["data"]:
        problem(where, f"no ConfigMap is mounted with {path}")


def check_together(where: str, things: list):
    """What objects say of each other."""
    by_kind = lambda *kinds: [thing for thing in things if thing["kind"] in kinds]
    pods = [(thing, thing["spec"]["template"]) for thing in by_kind("Deployment", "DaemonSet")]
    accounts = {thing["metadata"]["name"] for thing in by_kind("ServiceAccount")}
    for thing, template in pods:
        name = f"{where}, {thing['kind']} {thing['metadata']['name']}"
        if not labels_fit(thing["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
            problem(name, "it does not select its own pods")
        if template["spec"].get("serviceAccountName", "default") not in accounts | {"default"}:
            problem(name, "there is no such ServiceAccount")
        check_pod(name, template["spec"], things)
    fitting = lambda selector: [template for _, template in pods if labels_fit(selector, template["metadata"]["labels"])]
    for service in by_kind("Service"):
        name, templates = f"{where}, Service {service['metadata']['name']}", fitting(service["spec"]["selector"])
        ports = {port["name"] for template in templates for container in template["spec"]["containers"] for port in container.get("ports", [])}
        if len(templates) != 1 or not {port["targetPort"] for port in service["spec"]["ports"]} <= ports:
            problem(name, "it needs the pods of one workload, with its ports")
    for budget in by_kind("PodDisruptionBudget"):
        if len(fitting(budget["spec"]["selector"]["matchLabels"])) != 1:
            problem(where, "the PodDisruptionBudget is not about one workload")
    roles = {role["metadata"]["name"] for role in by_kind("Role")}
    for binding in by_kind("RoleBinding"):
        if binding["roleRef"]["name"] not in roles or binding["subjects"][0]["name"] not in accounts:
            problem(where, "the RoleBinding names no Role or no ServiceAccount")
    services = {service["metadata"]["name"]: service for service in by_kind("Service")}
    for pool in by_kind("InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        ports = [port["port"] for port in services.get(picker["name"], {"spec": {"ports": []}})["spec"]["ports"]]
        if picker["port"]["number"] not in ports:
            problem(where, "the InferencePool names no port of the picker's service")
        for role in by_kind("Role"):
            named = [rule["resourceNames"] for rule in role["rules"] if rule["resources"] == ["inferencepools"]]
            if named != [[pool["metadata"]["name"]]]:
                problem(where, "the Role is about another InferencePool")


def check_rights(where: str, things: list):
    """No right beyond those of the base, whose rules the gateway's tests apply to each of its requests."""
    base = [thing for thing in yaml.safe_load_all((ROOT / "ops/kubernetes/base/rights.yaml").read_text()) if thing["kind"] == "Role"]
    allowed = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in base[0]["rules"]]
    for role in (thing for thing in things if thing["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            if (rule["apiGroups"], rule["resources"], rule["verbs"]) not in allowed:
                problem(where, f"the right to {rule['verbs']} {rule['resources']} is not needed")


def check_configs(where: str, things: list, programs: dict):
    """The programs accept their files."""
    for config in (thing for thing in things if thing["kind"] == "ConfigMap"):
        for name, text in config["data"].items():
            program = programs[name]
            if not os.access(program, os.X_OK):
                skipped.append(f"{name} of the manifests: {program.name} is not built")
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / name
                file.write_text(text)
                checked = subprocess.run([str(program), "serve", "--config", str(file), "--check"], capture_output=True, text=True)
                if checked.returncode != 0:
                    problem(where, f"{program.name} serve --check refuses {name}: {checked.stderr}")


def check(where: str, text: str, programs: dict):
    things = [thing for thing in yaml.safe_load_all(text) if thing]
    counts["objects"] += len(things)
    counts["renderings"] += 1
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in things]
    for twice in {name for name in names if names.count(name) > 1}:
        problem(where, f"{twice} occurs twice")
    for thing in things:
        check_schema(f"{where}, {thing['kind']} {thing['metadata']['name']}", thing)
    check_together(where, things)
    check_rights(where, things)
    check_configs(where, things, programs)


def chart(write: bool, programs: dict):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    jsonschema.Draft7Validator.check_schema(schema.schema)
    for error in schema.iter_errors(values):
        problem("values.yaml", f"{'.'.join(map(str, error.path))}: {error.message}")
    for bad in BAD_VALUES:
        if schema.is_valid(merged(values, bad)):
            problem("values.schema.json", f"it accepts {bad}")
    go = shutil.which("go") or shutil.which("go", path="/usr/lib/go-1.19/bin:/usr/local/go/bin")
    if go is None:
        skipped.append("rendering the chart: there is no Go (Debian: apt-get install golang-1.19-go)")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for example in sorted((CHART / "examples").glob("*.yaml")):
        chosen = merged(values, yaml.safe_load(example.read_text()))
        for error in schema.iter_errors(chosen):
            problem(example.name, f"{'.'.join(map(str, error.path))}: {error.message}")
        golden = GOLDEN / example.name
        if go is not None:
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "values.json"
                file.write_text(json.dumps(chosen))
                command = [go, "run", str(ROOT / "scripts/charts/render.go"), str(CHART / "templates"), str(file), "kvrouted", "serving"]
                environment = {**os.environ, "GO111MODULE": "off", "GOFLAGS": ""}
                rendered = subprocess.run(command, capture_output=True, text=True, env=environment)
            if rendered.returncode != 0:
                problem(example.name, rendered.stderr)
                continue
            if write:
                golden.write_text(rendered.stdout)
            elif not golden.exists() or golden.read_text() != rendered.stdout:
                problem(example.name, "its rendering differs from tests/fixtures/charts: if it is meant, scripts/test-charts --write")
        if golden.exists():
            check(f"chart, {example.stem}", golden.read_text(), programs)


def manifests(programs: dict):
    command = next(([found, *words] for tool, words in [("kustomize", ["build"]), ("kubectl", ["kustomize"])] if (found := shutil.which(tool))), None)
    if command is None:
        skipped.append("building the overlays of ops/kubernetes: there is neither kustomize nor kubectl")
        return
    for overlay in sorted((MANIFESTS / "overlays").iterdir()):
        for with_metrics in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                # An overlay of its own, as users write it: kustomize takes no paths from the root of the file system.
                user = pathlib.Path(folder) / "kubernetes"
                shutil.copytree(MANIFESTS, user)
                mine = {"resources": [f"../overlays/{overlay.name}"], "components": ["../components/metrics"] if with_metrics else []}
                (user / "mine").mkdir()
                (user / "mine/kustomization.yaml").write_text(json.dumps(mine))
                built = subprocess.run([*command, str(user / "mine")], capture_output=True, text=True)
            name = f"overlay {overlay.name}{' with metrics' if with_metrics else ''}"
            if built.returncode != 0:
                problem(name, built.stderr)
            else:
                check(name, built.stdout, programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tests/fixtures/charts anew")
    arguments = parser.parse_args()
    programs = {"kvrouted.toml": pathlib.Path(os.environ.get("KVROUTED_BIN", ROOT / "target/debug/kvrouted")),
                "gateway.toml": pathlib.Path(os.environ.get("KVROUTED_GATEWAY_BIN", ROOT / "gateway/target/debug/kvrouted-gateway"))}
    chart(arguments.write, programs)
    manifests(programs)
    for reason in sorted(set(skipped)):
        print(f"skipped: {reason}")
    for text in problems:
        print(f"test-charts: {text}", file=sys.stderr)
    print(f"charts: {counts['renderings']} renderings, {counts['objects']} objects, Kubernetes {' and '.join(VERSIONS)}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
