"""Compiles the C client's test and example as strictly as it can, and runs them against a real daemon."""

import json
import shutil
import socket
import subprocess
import tempfile
import threading
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import flatbuffers
from xxhash import xxh3_64_intdigest

from kvrouted import Client, Options, RouteRequest, Scheme, frames
from kvrouted.hashing import local_hashes
from kvrouted.schema_generated import routing_generated as fb
from tests.daemon import PATIENCE_S, PREDICTED, ROOT, Daemon
from tests.hostile import Behave, Hostile, floods, hands_descriptors, trickles, turns_pages

HERE = Path(__file__).resolve().parent
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-g"]
#: A model whose caches are guessed from what was booked, and one of two pools. Costs of mode kv do not change with time.
TABLES = """
[policy]
mode = "kv"
affinity = "hard"

[[space]]
model = "m"
block_size = 16
approximate = true

[[worker]]
id = 1
model = "m"
name = "one"
taints = ["fast", "near"]

[[worker]]
id = 2
model = "m"
""" + "".join(
    f'[[space]]\nmodel = "pair"\nblock_size = 16\nrole = "{role}"\n[[worker]]\nid = {at}\nmodel = "pair"\nrole = "{role}"\n'
    for at, role in ((3, "prefill"), (4, "decode"))
)
#: How a call of test_hostile.c ends, as kvrouted_types.h numbers it.
TIMEOUT, CLOSED, MALFORMED = 2, 3, 5
#: Its timeout is 300 ms. A call without a deadline over all of it does not end by itself.
CALL_MS_MAX = 10_000
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def overloaded() -> bytes:
    """The frame that a daemon sends to a connection that it does not take."""
    builder = flatbuffers.Builder(64)
    message = builder.CreateString("too many connections")
    fb.ErrorStart(builder)
    fb.ErrorAddCode(builder, 13)
    fb.ErrorAddRetryable(builder, True)
    fb.ErrorAddMessage(builder, message)
    builder.Finish(fb.ErrorEnd(builder), file_identifier=b"KVRT")
    body = bytes(builder.Output())
    body += bytes(-len(body) % 8)
    return frames._HEADER.pack(len(body), fb.Kind.Error, 0, 1, 0) + body


class Refusing:
    """Listens where the daemon did, and takes no connections."""

    def __init__(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.serving = threading.Thread(target=self.serve)
        self.serving.start()

    def serve(self) -> None:
        while True:
            connection = self.listener.accept()[0]
            with connection:
                # Its hello is read first: what is unread when a socket closes may cost its peer the answer.
                if not connection.recv(1 << 16):
                    return
                connection.sendall(overloaded())

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
        self.serving.join()
        self.listener.close()
        Path(self.path).unlink()


class CClient(unittest.TestCase):
    def setUp(self):
        self.compiler = shutil.which("cc")
        if self.compiler is None:
            # For scripts/test, which lists what was skipped.
            print("skipped: the C client: no compiler (Debian: apt-get install gcc)", flush=True)
            self.skipTest("no C compiler")
        folder = tempfile.TemporaryDirectory(prefix="kvrouted-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def build(self, source: str, *flags: str) -> str:
        program = str(self.folder / source.removesuffix(".c"))
        subprocess.run([self.compiler, "-std=c99", *STRICT, *flags, "-o", program, HERE / source], check=True)
        return program

    def sanitizers(self) -> list[str]:
        """The sanitizers, where this compiler has them."""
        empty = self.folder / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        build = [self.compiler, *SANITIZED, "-o", str(self.folder / "empty"), str(empty)]
        return SANITIZED if subprocess.run(build, capture_output=True).returncode == 0 else []

    def run_beside(self, daemon: Daemon, command: list[str], said: dict[str, Callable[[], object]]) -> list[str]:
        """Runs a program that says by a line what is to be done before it goes on; answers with what it said."""
        wanted = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as running, ExitStack() as stopped:
            for line in running.stdout:
                wanted.append(line.strip())
                if wanted[-1] == "stop":
                    stopped.enter_context(daemon.silent())
                elif wanted[-1] == "go on":
                    stopped.close()
                elif wanted[-1] == "kill":
                    daemon.kill()
                elif wanted[-1] == "start":
                    daemon.start()
                else:
                    said[wanted[-1]]()
                running.stdin.write("done\n")
                running.stdin.flush()
            self.assertEqual(running.wait(PATIENCE_S), 0)
        return wanted

    def test_a_program_of_the_header_and_a_daemon_understand_each_other(self):
        program = self.build("test_client.c", *self.sanitizers())
        for way in (["socket", "0"], ["socket", "100"], ["lane", "0"], ["lane", "100"]):
            with self.subTest(way=way):
                self.understands(program, way)

    def understands(self, program: str, way: list[str]) -> None:
        daemon = Daemon(TABLES)
        self.addCleanup(daemon.remove)
        hashes = local_hashes([at * 31 for at in range(70)], Scheme(16))
        listed = " ".join(f"{hash_of:x}" for hash_of in hashes)
        said = {
            "drain 2": lambda: daemon.administer("worker", "set", "2", "draining=true"),
            "undrain 2": lambda: daemon.administer("worker", "set", "2", "draining=false"),
        }
        wanted = self.run_beside(daemon, [program, daemon.socket, listed, *way], said)
        self.assertEqual(wanted, ["drain 2", "undrain 2", "stop", "go on", "kill", "start"])

    def test_a_program_by_a_lane_is_told_why_the_lane_ends(self):
        program = self.build("test_client.c", *self.sanitizers())
        daemon = Daemon("frame_timeout_ms = 300\n" + PREDICTED)
        self.addCleanup(daemon.remove)
        for spin_us in ("0", "100"):
            with self.subTest(spin_us=spin_us):
                self.assertEqual(self.run_beside(daemon, [program, daemon.socket, "", "overdue", spin_us], {}), [])

    def test_a_program_outlives_its_daemon(self):
        program = self.build("test_steady.c", *self.sanitizers())
        for way in (["socket", "0"], ["lane", "0"], ["lane", "100"], ["none", "100"]):
            with self.subTest(way=way):
                self.outlives(program, way)

    def outlives(self, program: str, way: list[str]) -> None:
        daemon = Daemon(("lanes_max = 0\n" if way[0] == "none" else "") + PREDICTED)
        self.addCleanup(daemon.remove)

        def nothing_is_booked() -> None:
            with Client(daemon.socket, Options(timeout_s=PATIENCE_S)) as client:
                reply = client.route(RouteRequest(model="m", tokens=[1], explain=True))
                self.assertEqual([candidate.terms.active_requests for candidate in reply.candidates], [0.0, 0.0])

        refusing = []
        config = daemon.folder / "config.toml"
        said = {
            "free": nothing_is_booked,
            "refuse": lambda: refusing.append(Refusing(daemon.socket)),
            "refuse no more": lambda: refusing.pop().close(),
            "number the spaces anew": lambda: config.write_text(
                config.read_text()
                .replace("[[space]]", '[[space]]\nmodel = "before"\nblock_size = 16\n[[space]]', 1)
                .replace("[[worker]]", '[[worker]]\nmodel = "m"')
            ),
        }
        wanted = self.run_beside(daemon, [program, daemon.socket, *way], said)
        refused = ["refuse", "refuse no more", "number the spaces anew"]
        self.assertEqual(wanted, ["stop", "go on", "free", "kill", *refused, "start", "free"])

    def test_hashes_and_choices_without_the_daemon_are_those_of_the_other_clients(self):
        program = self.build("test_steady.c", *self.sanitizers())
        vectors = json.loads((ROOT / "tests/fixtures/fallback_vectors.json").read_text())
        lines, expected = [], []
        for vector in vectors["costs"]:
            lines.append(f"cost {vector['draw']}")
            expected.append(str(vector["units"]))
        for vector in vectors["choices"]:
            prompt = vector.get("local_hashes", vector.get("tokens"))
            numbers = [vector["prefix_tokens"], vector.get("block_size", 0), len(prompt), *prompt]
            names = [vector.get(name, "-") for name in ("lora", "salt", "session")]
            workers = [number for row in vector["workers"] for number in (*row["worker"], row["weight"])]
            lines.append(" ".join(map(str, ["choice", *numbers, *names, len(vector["workers"]), *workers])))
            expected.append(" ".join([str(vector["key"]), *(f"{at}/{rank}" for at, rank in vector["ranked"])]))
        pattern = bytes((at * 2654435761 >> 13) & 255 for at in range(3000))
        for length in [*range(300), *range(1000, 1100), 2048, 2049, 2999, 3000]:
            for seed in (0, 1337, 2**64 - 1):
                lines.append(f"hash {length} {seed}")
                expected.append(str(xxh3_64_intdigest(pattern[:length], seed)))
        ran = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertEqual(ran.stdout.splitlines(), expected)

    def test_the_example_books_and_frees(self):
        program = self.build("example.c", "-O2")
        daemon = Daemon()
        self.addCleanup(daemon.remove)
        for _ in range(2):
            # The same booking again: the first has been freed.
            ran = subprocess.run([program, daemon.socket, "m"], capture_output=True, text=True, timeout=PATIENCE_S)
            self.assertEqual((ran.returncode, ran.stderr), (0, ""))
            self.assertRegex(ran.stdout, r"^m: 16 tokens a block\nworker [12]/0 holds \d of 4 blocks, cost ")
        ran = subprocess.run([program, daemon.socket, "n"], capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual((ran.returncode, ran.stderr), (1, f"{daemon.socket}: the daemon has no such model\n"))

    def test_the_request_of_the_readme_books_and_frees(self):
        program = self.build("route.c", "-O2")
        daemon = Daemon()
        self.addCleanup(daemon.remove)
        for _ in range(2):
            # The same booking again: the first has been freed.
            ran = subprocess.run([program, daemon.socket, "m"], capture_output=True, text=True, timeout=PATIENCE_S)
            self.assertEqual((ran.returncode, ran.stderr), (0, ""))
            self.assertRegex(ran.stdout, r"^send the prompt to worker [12]\n$")
        ran = subprocess.run([program, daemon.socket, "n"], capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual((ran.returncode, ran.stderr), (1, "the daemon has no such model\n"))

    def test_a_call_to_a_daemon_that_means_harm_ends_by_its_deadline_and_keeps_nothing(self):
        program = self.build("test_hostile.c", *self.sanitizers())
        cases: list[tuple[str, Behave, int]] = [
            ("route", floods, TIMEOUT),
            ("workers", floods, TIMEOUT),
            ("watch", floods, TIMEOUT),
            ("route", trickles, TIMEOUT),
            ("workers", turns_pages, TIMEOUT),
            ("lane", trickles, CLOSED),
            ("lane", hands_descriptors, MALFORMED),
        ]
        for call, behave, expected in cases:
            with self.subTest(call=call, behave=behave.__name__), Hostile(behave) as daemon:
                status, took_ms, descriptors, _ = self.harmed(program, daemon, call)
                self.assertEqual((status, descriptors), (expected, 0))
                self.assertLess(took_ms, CALL_MS_MAX)

    def test_a_block_size_that_no_daemon_has_makes_no_room_for_a_block(self):
        program = self.build("test_hostile.c")
        with Hostile(trickles, block_size=1 << 27) as daemon:
            _, _, _, grew_kib = self.harmed(program, daemon, "hash")
        self.assertLess(grew_kib, 64 << 10, "a block of 2^27 tokens would take 512 MiB")

    def harmed(self, program: str, daemon: Hostile, call: str) -> list[int]:
        """Status, milliseconds, descriptors left open and KiB of memory of one call."""
        ran = subprocess.run([program, daemon.socket, call], capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        return [int(number) for number in ran.stdout.split()]

    def test_the_header_is_cpp_too(self):
        compiler = shutil.which("c++")
        if compiler is None:
            self.skipTest("no C++ compiler")
        build = [compiler, "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        for source in ("example.c", "route.c", "test_hostile.c", "test_steady.c"):
            subprocess.run([*build, HERE / source], check=True)
