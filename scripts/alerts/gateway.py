"""A kvrouted-gateway that runs a daemon of its own, before engines with an HTTP server, and what goes wrong with them."""

import http.server
import itertools
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

from fault import Fault
from publishing_engine import BLOCK_TOKENS, Engine, free_port

ENGINES = 4
CONVERSATIONS = 8
READY_SECONDS_MAX = 120


class EngineServer:
    """The HTTP server of an engine, as far as a gateway asks vLLM's: it lists a model and completes prompts of token ids."""

    def __init__(self, worker: int):
        self.cache, self.port = Engine(worker), free_port()
        #: well, errs (500), sometimes_unavailable (some requests get 503), forgetful (it says that nothing was cached)
        self.manner = "well"
        self.requests = itertools.count()
        self.start()

    def start(self):
        self.is_gone = False
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), handler_of(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kill(self):
        """Connections are refused, and those that are open end with their next request."""
        self.is_gone = True
        self.server.shutdown()
        self.server.server_close()

    def page(self, path: str):
        """What it says of itself."""
        return {"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]},
                "/version": {"version": "0.11.0"}, "/health": {},
                "/kv_event_sources": {"0": {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{self.cache.port}", "topic": ""}},
                "/metrics": f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",enable_prefix_caching="True"}} 1.0\n'}.get(path)

    def complete(self, body: dict) -> tuple:
        """The status and the body of a completion."""
        number = next(self.requests)
        if self.manner == "errs" or self.manner == "sometimes_unavailable" and number % 6 == 0:
            status = 500 if self.manner == "errs" else 503
            return status, {"error": {"message": "a fault of the test", "code": status}}
        tokens = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        computed = self.cache.run(tokens)
        time.sleep(0.02 + computed / 4000)
        cached = 0 if self.manner == "forgetful" else len(tokens) - computed
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1,
                 "prompt_tokens_details": {"cached_tokens": cached}}
        return 200, {"id": "1", "object": "text_completion", "model": "m", "usage": usage,
                     "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}


def handler_of(engine: EngineServer):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            page = engine.page(self.path)
            self.reply(404 if page is None else 200, page)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/v1/completions":
                self.reply(*engine.complete(json.loads(body)))
            else:
                self.reply(404, None)

        def reply(self, status: int, page):
            if engine.is_gone:
                self.close_connection = True
                return
            text = (page if isinstance(page, str) else json.dumps(page)).encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain" if isinstance(page, str) else "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    return Handler


class ApiServer:
    """A Kubernetes API server that lists a service without pods, and watches on."""

    def __init__(self):
        self.port = free_port()
        self.start()

    def start(self):
        self.ending = ending = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                if "watch=true" in self.path:
                    ending.wait()
                else:
                    kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
                    self.wfile.write(json.dumps({**kind, "metadata": {"resourceVersion": "1"}, "items": []}).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kill(self):
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()


class GatewayFleet:
    """A gateway with engines, one that follows a Kubernetes service, and callers."""

    def __init__(self, gateway: str, kvrouted: str, folder: pathlib.Path):
        self.folder = folder
        self.engines = [EngineServer(worker) for worker in range(1, ENGINES + 1)]
        self.api = ApiServer()
        self.port, self.admin, self.pick, self.pods_admin = (free_port() for _ in range(4))
        engines = "".join(f'[[engine]]\nurl = "http://127.0.0.1:{engine.port}"\n' for engine in self.engines)
        # Little patience, so that a fault shows soon.
        common = f'[daemon]\nprogram = "{kvrouted}"\ntimeout_ms = 2000\n'
        self.process = self.started(gateway, "gateway", f"""
[listen]
address = "127.0.0.1:{self.port}"
[admin]
address = "127.0.0.1:{self.admin}"
[pick]
address = "127.0.0.1:{self.pick}"
booking_ms_max = 2000
{common}{engines}""")
        self.pods = self.started(gateway, "gateway-pods", f"""
[listen]
address = "127.0.0.1:{free_port()}"
[admin]
address = "127.0.0.1:{self.pods_admin}"
[kubernetes]
service = "serving/engines"
url = "http://127.0.0.1:{self.api.port}"
{common}""")
        self.targets = [f"127.0.0.1:{self.admin}", f"127.0.0.1:{self.pods_admin}"]
        self.sends_text = False
        self.until_ready()
        for conversation in range(CONVERSATIONS):
            threading.Thread(target=self.converse, args=(conversation,), daemon=True).start()

    def started(self, gateway: str, name: str, config: str) -> subprocess.Popen:
        file = self.folder / f"{name}.toml"
        file.write_text(config)
        log = open(self.folder / f"{name}.log", "a")
        return subprocess.Popen([gateway, "serve", "--config", str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def until_ready(self):
        deadline = time.monotonic() + READY_SECONDS_MAX
        while self.post(self.port, "/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}) != 200 or not self.daemon():
            if time.monotonic() > deadline:
                raise SystemExit(f"test-alerts: the gateway is not ready, see {self.folder}/gateway.log")
            time.sleep(0.5)
        time.sleep(2)
        # After an engine's clear the daemon knows its cache.
        for engine in self.engines:
            engine.cache.clear()

    def post(self, port: int, path: str, body: dict) -> int:
        """The status of the reply, or 0 if there is none."""
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                         {"content-type": "application/json", "x-kvrouted-path": "/v1/completions"})
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                reply.read()
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, ValueError):
            return 0

    def converse(self, number: int):
        """Turns of a conversation, for ever: each prompt begins with the one before it."""
        for turn in itertools.count():
            length = 64 + turn % 12 * 48
            tokens = [number * 100_000 + turn // 12 * 1000 + at for at in range(length)]
            text = self.sends_text and number % 2 == 0
            self.post(self.port, "/v1/completions", {"model": "m", "prompt": f"prompt {number} {turn}" if text else tokens, "max_tokens": 1})
            time.sleep(0.3)

    def daemon(self) -> int | None:
        """The process id of the gateway's daemon, if it runs."""
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                children = (task / "children").read_text().split()
            except OSError:
                continue
            if children:
                return int(children[0])
        return None

    def signal_daemon(self, number: int):
        daemon = self.daemon()
        if daemon:
            os.kill(daemon, number)

    def end(self):
        for process in (self.process, self.pods):
            process.send_signal(signal.SIGCONT)
            self.signal_daemon(signal.SIGCONT)
            process.terminate()
        for process in (self.process, self.pods):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def faults(fleet: GatewayFleet) -> list:
    engines = fleet.engines

    def mannered(manner: str, some: list):
        def change():
            for engine in some:
                engine.manner = manner
        return change

    def kill():
        for engine in engines:
            engine.kill()

    def start():
        for engine in engines:
            engine.start()

    def texts(sends: bool):
        def change():
            fleet.sends_text = sends
        return change

    def forget_picks():
        for number in range(4):
            fleet.post(fleet.pick, "/pick", {"model": "m", "prompt": [9_000_000 + number] * 40})

    well, nothing = mannered("well", engines), lambda: None
    return [
        Fault("gateway stopped: it gets SIGSTOP", lambda: fleet.process.send_signal(signal.SIGSTOP),
              lambda: fleet.process.send_signal(signal.SIGCONT), ["KvroutedGatewayDown"], stops="kvrouted-gateway"),
        Fault("gateway errors: engines answer 500", mannered("errs", engines), well, ["KvroutedGatewayErrors"],
              silent=("KvroutedGatewayRefuses",)),
        Fault("gateway engines gone: connections are refused", kill, start, ["KvroutedGatewayRefuses", "KvroutedGatewayErrors"]),
        Fault("gateway daemon stands still: it gets SIGSTOP", lambda: fleet.signal_daemon(signal.SIGSTOP),
              lambda: fleet.signal_daemon(signal.SIGCONT), ["KvroutedGatewayWithoutDaemon"]),
        Fault("gateway pods: the API server ends", fleet.api.kill, fleet.api.start, ["KvroutedGatewayPodsUnknown"]),
        Fault("gateway texts: nothing gives their tokens", texts(True), texts(False), ["KvroutedGatewayByLoadAlone"]),
        Fault("gateway caches: engines have nothing cached", mannered("forgetful", engines), well, ["KvroutedGatewayCachesDiffer"]),
        Fault("gateway engines fail: each answers 503 now and then", mannered("sometimes_unavailable", engines), well,
              ["KvroutedGatewayEnginesFail"], silent=("KvroutedGatewayErrors",)),
        Fault("gateway picks: a proxy tells no ends", nothing, nothing, ["KvroutedGatewayReportsLost"], forget_picks),
        Fault("gateway daemon killed: again and again", nothing, nothing, ["KvroutedGatewayDaemonRestarts"],
              lambda: fleet.signal_daemon(signal.SIGKILL)),
    ]
