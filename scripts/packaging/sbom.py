"""Prints a list of the crates that the daemon is built from, in CycloneDX 1.5, from `cargo metadata` on standard input."""

import json
import os
import sys
import uuid


def component(package):
    made = {"type": "library", "name": package["name"], "version": package["version"],
            "purl": f"pkg:cargo/{package['name']}@{package['version']}"}
    if package.get("license"):
        made["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    return made


def linked(metadata):
    """The packages that the daemon links or is built with; those that only tests need are left out."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, open_ = set(), [metadata["resolve"]["root"]]
    while open_:
        at = open_.pop()
        if at in found:
            continue
        found.add(at)
        for dependency in nodes[at]["deps"]:
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]):
                open_.append(dependency["pkg"])
    return found


def main():
    version, metadata = sys.argv[1], json.load(sys.stdin)
    ids = linked(metadata)
    packages = sorted((of for of in metadata["packages"] if of["id"] in ids and of["name"] != "kvrouted"),
                      key=lambda of: (of["name"], of["version"]))
    text = json.dumps([(of["name"], of["version"]) for of in packages])
    # The same contents have the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"kvrouted {version} {text}")
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{number}", "version": 1,
           "metadata": {"component": {"type": "application", "name": "kvrouted", "version": version}},
           "components": [component(package) for package in packages]}
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        import datetime
        moment = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        bom["metadata"]["timestamp"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    json.dump(bom, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
