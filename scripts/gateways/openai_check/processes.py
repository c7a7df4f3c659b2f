"""Gateways, daemons and the peer's router, each a child that ends with this process."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request

from ports import free_ports

PATIENCE_S = 120
RECIPE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "gateway", "recipes", "envoy.yaml")


class Missing(Exception):
    """Something is not there; the text says what."""


def free_port():
    return free_ports(1)[0]


def get(url, timeout=30):
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return reply.read().decode()


def post(url, body=None, timeout=300):
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        data = reply.read()
    return json.loads(data) if data else None


class Child:
    """A process with a group of its own; its lines are kept."""

    def __init__(self, name, command):
        self.name, self.lines = name, []
        environment = {key: value for key, value in os.environ.items() if key not in ("RUST_LOG", "CHECK_OPENAI_INSIDE")}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, errors="replace", env=environment | {"NO_COLOR": "1"}, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def until(self, pattern):
        """The match of the first line that has it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.02)
        self.end()
        raise Missing(f"{self.name} does not say {pattern!r}; its last lines:\n" + "\n".join(self.lines[-20:]))

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Gateway(Child):
    """kvrouted-gateway with an admin port, whose replies name the worker: the proxy, or the picker behind Envoy."""

    def __init__(self, args, folder, engines, socket_path=None, envoy=None):
        config = os.path.join(folder, "gateway.toml")
        with open(config, "w") as file:
            file.write("forward.worker_headers = true\n")
        self.admin, self.envoy = f"127.0.0.1:{free_port()}", None
        daemon = ["--socket", socket_path] if socket_path else ["--kvrouted", args.kvrouted]
        command = [args.gateway, "epp" if envoy else "serve", "--config", config, "--listen", "127.0.0.1:0",
                   "--admin", self.admin, *daemon]
        super().__init__("the gateway", command + [part for url in engines for part in ("--engine", url)])
        self.url = self.until(r"serving on (\S+)")[1]
        if socket_path is None:
            self.socket = self.until(r"the daemon answers.* socket=(\S+)")[1]
        if envoy:
            self.envoy = Envoy(envoy, folder, self.url, engines)
            self.url = self.envoy.url

    def end(self):
        if self.envoy:
            self.envoy.end()
        super().end()

    def counter(self, name, label):
        """The values of a counter by its label."""
        text = get(f"http://{self.admin}/metrics")
        found = re.findall(rf'^kvrouted_gateway_{name}_total{{{label}="(\w+)"}} (\d+)', text, re.M)
        return {value: int(count) for value, count in found}

    def findings(self):
        return json.loads(get(f"http://{self.admin}/findings"))["findings"]


class Envoy(Child):
    """Envoy with the recipe envoy.yaml, changed as its own comment says."""

    def __init__(self, binary, folder, picker, engines):
        version = re.search(r"/(\d+)\.(\d+)\.\d+/", subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout)
        port, admin = free_port(), free_port()
        with open(RECIPE) as file:
            text = file.read()
        endpoint = re.compile(r"( *- endpoint: .*port_value: )800\d(}}}\n)")
        first, places = endpoint.search(text), iter([url.rsplit(":", 1)[1] for url in engines])
        text = endpoint.sub("", text[: first.start()]) + "".join(f"{first[1]}{place}{first[2]}" for place in places) + endpoint.sub("", text[first.end() :])
        for old, new in ((10000, port), (9901, admin), (9002, picker.rsplit(":", 1)[1])):
            text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
        if (int(version[1]), int(version[2])) < (1, 38):
            text = "".join(line for line in text.splitlines(True) if "selected_host_key" not in line)
        config = os.path.join(folder, "envoy.yaml")
        with open(config, "w") as file:
            file.write(text)
        super().__init__("Envoy", [binary, "-c", config, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"])
        self.url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if re.search(r"picker::\S*health_flags::healthy", get(f"http://127.0.0.1:{admin}/clusters")):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.end()
        raise Missing("Envoy does not find the picker; its last lines:\n" + "\n".join(self.lines[-20:]))


class Daemon(Child):
    """kvrouted with a policy of its own, for the engines as they say where they publish."""

    def __init__(self, args, folder, engines, mode):
        self.socket = os.path.join(folder, f"{mode}.sock")
        config = os.path.join(folder, f"{mode}.toml")
        tables = [f'serve.socket = "{self.socket}"', f'policy.mode = "{mode}"', f'[[space]]\nmodel = "{args.model}"',
                  f'block_size = {engines[0].block_size}\nfull_reports = "none"']
        if args.journal:
            tables.insert(0, f'journal.dir = "{os.path.join(args.journal, mode)}"')
        for engine in engines:
            tables.append(f'[[worker]]\nid = {engine.worker}\nendpoint = "{engine.endpoint}"\nreplay = "{engine.replay}"')
        with open(config, "w") as file:
            file.write("\n".join(tables) + "\n")
        super().__init__("the daemon", [args.kvrouted, "serve", "--config", config])
        self.until("serving")


class Peer(Child):
    """sglang-router, cache-aware as by default."""

    def __init__(self, python, engines):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *[engine.url for engine in engines],
                   "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port),
                   "--prometheus-port", str(free_port())]
        super().__init__("sglang-router", command)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                post(self.url + "/v1/chat/completions", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]})
                return
            except OSError:
                time.sleep(0.5)
        self.end()
        raise Missing("sglang-router does not serve; its last lines:\n" + "\n".join(self.lines[-20:]))


class Engine:
    """A vLLM server that runs already."""

    def __init__(self, worker, url):
        self.worker, self.url = worker, url.rstrip("/")
        try:
            source = json.loads(get(self.url + "/kv_event_sources"))["0"]
            info = re.search(r'vllm:cache_config_info{[^}]*block_size="(\d+)"', get(self.url + "/metrics"))
        except (OSError, KeyError, ValueError) as error:
            raise Missing(f"{url} is no vLLM server that publishes KV events: {error}") from error
        if info is None or not source.get("replay_endpoint"):
            raise Missing(f"{url} says no block size, or has no replay endpoint")
        host = url.split("//")[1].split(":")[0]
        self.endpoint, self.replay = (source[key].replace("*", host) for key in ("endpoint", "replay_endpoint"))
        self.block_size = int(info[1])
