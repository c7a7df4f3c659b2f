"""Compiles the C client's test and example as strictly as it can, and runs them against a real daemon."""

import shutil
import subprocess
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path

from kvrouted import Scheme
from kvrouted.hashing import local_hashes
from tests.daemon import PATIENCE_S, Daemon

HERE = Path(__file__).resolve().parent
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-g"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


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

    def test_a_program_of_the_header_and_a_daemon_understand_each_other(self):
        program = self.build("test_client.c", *self.sanitizers())
        daemon = Daemon()
        self.addCleanup(daemon.remove)
        hashes = local_hashes([at * 31 for at in range(70)], Scheme(16))
        listed = " ".join(f"{hash_of:x}" for hash_of in hashes)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        wanted = []
        with subprocess.Popen([program, daemon.socket, listed], **pipes) as running, ExitStack() as stopped:
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
                running.stdin.write("done\n")
                running.stdin.flush()
            self.assertEqual(running.wait(PATIENCE_S), 0)
        self.assertEqual(wanted, ["stop", "go on", "kill", "start"])

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

    def test_the_header_is_cpp_too(self):
        compiler = shutil.which("c++")
        if compiler is None:
            self.skipTest("no C++ compiler")
        build = [compiler, "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        subprocess.run([*build, HERE / "example.c"], check=True)
