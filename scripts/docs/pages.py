"""What the commands of the documentation pages need, and which of them are not run and why.

`scripts/test-docs` reads these tables. A command that no table names is run, and must exit with 0. A page is named by the
beginning of its path; `""` stands for all pages.
"""

import gzip
import json
import re
import time
import urllib.request

#: Commands that are not run: (page, command, reason). A run lists them at its end.
SKIPPED = [
    ("", r"^sudo(edit)? |^apt-get ", "it changes the machine"),
    ("", r"^vllm serve|^python -m sglang", "it needs a GPU and the engine"),
    ("", r"^journalctl |systemctl ", "it needs a machine that systemd runs"),
    ("", r"^dmesg ", "it needs the kernel's log"),
    ("", r"^kubectl auth ", "it needs a cluster"),
    ("", r"^helm ", "it needs Helm and a cluster; scripts/test-charts checks the chart"),
    ("", r"kubernetes-(pool|service) |^kvrouted-gateway peers", "it needs a cluster; gateway/tests use a double of its API server"),
    ("", r"^(KVROUTED_\w+=\S+ )*cargo (test|bench)\b", "it builds for minutes; scripts/test runs the tests"),
    ("", r"^cargo (build|install)\b", "it builds for minutes; the programs are built already"),
    ("", r"perf/Cargo.toml|^perf[ (]", "it builds and measures for minutes"),
    ("", r"^scripts/engines/fetch", "it fetches 400 MB"),
    ("", r"^scripts/(package|release)", "it makes a release build"),
    ("docs/operating.md", r"^sha256sum |^git checkout |^diff SHA256SUMS ", "it needs the files of a release"),
    ("", r"^(KVROUTED_\w+=\S+ )*scripts/", "it runs for minutes, by itself"),
    ("docs/gateway.md", r"^(envoy|nginx) ", "gateway/tests run the recipes with the real proxy"),
    ("docs/gateway.md", r"^curl http://127.0.0.1:(10000|8080)/v1/models", "it needs that proxy"),
]

#: (command, what runs in its place): what a user builds is built already, no cluster is needed to render manifests, and a
#: debug build simulates fewer requests.
STAND_INS = [
    (r"^cargo build --release( --bin kvrouted)? && ", ""),
    (r"^(KVROUTED_BIN=\S+ )?cargo run --release --manifest-path gateway/Cargo.toml -- ", "kvrouted-gateway "),
    (r"^cargo run --release -- demo$", "kvrouted demo --requests 150"),
    (r"^cargo run --example (\w+) -- ", r"example-\1 "),
    (r"^kubectl apply -k (\S+)", r"kubectl kustomize \1 > rendered.yaml"),
    (r"http://GATEWAY/", "http://127.0.0.1:9464/"),
    (r" --requests 20000\b", ""),
    (r"^(kvrouted simulate .*--generate .*)$", r"\1 --requests 80"),
    (r"^(kvrouted what-if .*)$", r"\1 --seeds 1"),
    (r"^(kvrouted tune \S+journal.*)$", r"\1 --seeds 1 --trials 4"),
]

#: (page, command, the program whose server it asks).
ASKS = [
    ("", r"GATEWAY|:9464", "kvrouted-gateway"),
    ("docs/alerts.md", r"^ss ", "kvrouted-gateway"),
    ("docs/gateway.md", r"v1/chat/completions", "kvrouted-gateway"),
    ("docs/gateway.md", r"v1/completions", "example-gateway"),
]

#: Commands that go on until they are stopped, by SIGTERM, which must end them with 0.
SERVERS = [
    r"^kvrouted (serve|relay|connect)\b(?!.*(--check|--example-config))",
    r"^(KVROUTED_\w+=\S+ )*kvrouted-gateway(?!.*example-config)( serve| epp| demo)?( --?[a-z]|$)",
    r"^example-gateway ",
    r"scripts/engines/publish.py ",
]

#: (page, command, exit codes that its page allows).
EXITS = [
    ("", r"^kvrouted doctor", {0, 1}),
    # The file is not the daemon's.
    ("docs/operating.md", r"^kvrouted config diff", {1}),
]

#: Pages whose shown output is compared: numbers and times may differ, and `…` stands for anything.
SHOWN = ["docs/http-dynamo.md", "docs/engines.md", "docs/doctor.md"]

#: Names of other hosts in the pages, and the addresses that stand for them. All of them lead to this machine.
HOSTS = {"router-1": "10.0.0.1", "router-2": "10.0.0.2", "router-3": "10.0.0.3", "router-2.example": "10.0.0.5",
         "nats-1": "10.0.0.6", "nats-2": "10.0.0.6", "HOST": "10.0.0.6"}
ADDRESSES = sorted(set(HOSTS.values()) | {f"10.0.0.{last}" for last in (7, 8, 9, 10)})

#: A program of a command, and what it is needed for.
TOOLS = ["ss", "pidstat", "nc", "nats-server", "promtool", "kubectl", "openssl", "curl", "pgrep", "cc"]

SPACE = '[[space]]\nmodel = "{model}"\nblock_size = 16\n'


def packaged(stage):
    """The configuration of the package, with a worker that publishes, as the operator of the pages has it."""
    text = (stage.root / "packaging/kvrouted.toml").read_text()
    stage.write("/etc/kvrouted/kvrouted.toml", text + '\n[[worker]]\nid = 1\nendpoint = "tcp://127.0.0.1:5557"\n')
    stage.publisher(5557)


def running(stage):
    packaged(stage)
    stage.serve("kvrouted serve --config /etc/kvrouted/kvrouted.toml")


def first_worker(stage):
    """The package as it is, without workers, and the engine that the page names to it."""
    stage.write("/etc/kvrouted/kvrouted.toml", (stage.root / "packaging/kvrouted.toml").read_text())
    stage.publisher(5557, "10.0.0.8")
    stage.serve("kvrouted serve --config /etc/kvrouted/kvrouted.toml")


def alerts(stage):
    running(stage)
    stage.engine("10.0.0.8", 8000)
    if stage.has("kvrouted-gateway"):
        stage.serve("kvrouted-gateway serve --socket /run/kvrouted/kvrouted.sock --engine 1=http://10.0.0.8:8000")


def doctor(stage):
    """The fleet of the page: something else than a publisher, nothing, and a worker without an endpoint."""
    stage.stranger("127.0.0.1", 8000)
    stage.serve("kvrouted serve --socket /tmp/kvrouted.sock --model m --block-size 16 --worker id=1,endpoint=tcp://127.0.0.1:8000"
                " --worker id=2,endpoint=tcp://10.0.0.7:5557 --worker id=3")
    time.sleep(9)


def readme(stage):
    stage.engine("10.0.0.8", 8000)
    stage.engine("10.0.0.9", 8000)
    stage.publisher(5557)


def gateway(stage):
    for last, port in ((8, 8000), (9, 8000)):
        stage.engine(f"10.0.0.{last}", port)
    for port in (8001, 8002, 8003):
        stage.engine("127.0.0.1", port)
    stage.write("gateway.toml", "\n".join(stage.shown(r"^cat gateway.toml")) + "\n")


def example_gateway(stage):
    stage.serve("kvrouted serve --socket /tmp/kvrouted.sock --model M --block-size 16 --worker id=1 --worker id=2")


def workers(stage):
    file = re.search(r"\S+\.json", stage.command(r"^cat ").text)[0]
    stage.write(file, "\n".join(stage.shown(r"^cat ")) + "\n")
    stage.write("/etc/kvrouted/kvrouted.toml", SPACE.format(model="m") + '[discovery]\npath = "/etc/kvrouted/workers"\n')
    stage.serve("kvrouted serve --config /etc/kvrouted/kvrouted.toml")


def remote(stage):
    table = stage.block("toml")
    stage.write("/etc/kvrouted/kvrouted.toml", SPACE.format(model="my-model") + table
                + '[serve]\nsocket = "/run/kvrouted/daemon.sock"\n[[worker]]\nid = 1\n')


def token(stage):
    """What the page says in words: the token alone in a file, and the certificate of the authority."""
    stage.write("token", (stage.path("/etc/kvrouted/principals")).read_text().split()[1])
    stage.path("token").chmod(0o600)
    stage.write("ca.pem", stage.path("/etc/kvrouted/tls.crt").read_text())


def routers(stage):
    stage.write("/etc/kvrouted/kvrouted.toml", stage.block("toml") + SPACE.format(model="m") + "[[worker]]\nid = 1\n")


def restarts(stage):
    packaged(stage)


def published_again(stage):
    """The page says to wait for this line."""
    stage.until("publish.py", '"published"', 2)
    time.sleep(1)


def take_over(stage):
    stage.serve("kvrouted serve --config /etc/kvrouted/kvrouted.toml")


def nats(stage):
    stage.serve("nats-server --jetstream --addr 10.0.0.6 --store_dir /tmp/nats")


def engines(stage):
    stage.serve("kvrouted serve --socket /tmp/kvrouted.sock --model m --block-size 16 --worker id=1")


def tuning(stage):
    traces(stage)
    stage.write("/etc/kvrouted/kvrouted.toml", SPACE.format(model="m") + "[http]\nport = 8090\n"
                + '[journal]\ndir = "/var/lib/kvrouted-journal"\n'
                + "".join(f'[[worker]]\nid = {worker}\nendpoint = "tcp://127.0.0.1:{5556 + worker}"\n' for worker in (1, 2)))
    engines = [stage.publisher(5557), stage.publisher(5558)]
    stage.serve("kvrouted serve --config /etc/kvrouted/kvrouted.toml")
    conversations(engines)


def traces(stage):
    """Traces as the page names them, each in the format that its command says."""
    stage.write("mooncake_conversation.jsonl", "".join(
        json.dumps({"timestamp": 300 * at, "input_length": 1536, "output_length": 40, "hash_ids": [0, at % 7 + 1, at + 10]}) + "\n"
        for at in range(100)))
    stage.write("lengths.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0000000,{6000 + 10 * at},{100 + at % 40}\n" for at in range(100)))
    fields = ["t", "think_time", "api_time", "in", "out", "type", "depth", "hash_ranges"]
    turns = [[40.0 * turn, 10.0, 2.0, 512 * (turn + 2), 40, "n", 0, [[1, 8 * (turn + 2)]]] for turn in range(4)]
    session = {"block_size": 64, "tool_tokens": 128, "system_tokens": 128, "fields": fields, "requests": turns}
    with gzip.open(stage.path("sessions.jsonl.gz"), "wt") as out:
        out.writelines(json.dumps({"id": f"session-{number}", **session}) + "\n" for number in range(12))
    stage.write("fleet.toml", stage.block("toml", after="--example-fleet"))


def conversations(engines: list):
    """Turns of conversations through the daemon's HTTP port, on engines that cache what they run."""
    def ask(method: str, path: str, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:8090{path}", data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.loads(reply.read() or b"{}")

    for turn in range(4):
        for session in range(16):
            tokens = [session * 1000 + at % 997 for at in range(160 * (turn + 1))]
            name = f"r-{session}-{turn}"
            chosen = ask("POST", "/select_and_reserve", {"model_name": "m", "selection_id": name, "token_ids": tokens,
                                                         "session_id": f"s-{session}"})
            engines[chosen["worker_id"] - 1].run(tokens)
            time.sleep(0.005)
            ask("POST", f"/reservations/{name}/prefill_complete", {})
            ask("POST", f"/reservations/{name}/output_block", {})
            time.sleep(0.01)
            ask("DELETE", f"/reservations/{name}")
    time.sleep(2)


#: Setup steps that run before the first command of a page.
BEGIN = {
    "README.md": readme, "docs/alerts.md": alerts, "docs/doctor.md": doctor, "docs/gateway.md": gateway,
    "docs/operating.md": running, "docs/remote.md": remote, "docs/restarts.md": restarts, "docs/routers.md": routers,
    "docs/tuning.md": tuning, "docs/workers.md": workers,
}
#: (page, command, what is done before it).
BEFORE = [
    ("docs/gateway.md", r"^cargo run --example", example_gateway),
    ("docs/engines.md", r"^kvrouted reset", engines),
    ("docs/engines.md", r"sed -n 6p", published_again),
    ("docs/operating.md", r"^kvrouted worker add", first_worker),
    ("docs/remote.md", r"^kvrouted connect", token),
    ("docs/relay.md", r"--to nats:", nats),
    ("docs/restarts.md", r"--take-over", take_over),
]
