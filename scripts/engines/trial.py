"""One scenario: a daemon, the engine's publishers, and the comparison of what both say."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time

import daemon as daemons
from loader import cache
from ports import free_ports
from scenarios import Daemon, Must

HERE = os.path.dirname(os.path.abspath(__file__))
BLOCK_SIZE = 16
STAGE_PATIENCE_S = 180
# How long an answer that is not yet what it must be may still become so, and how long it must stay as it is.
SETTLE_S_MAX = 30
REST_S = 3
WORKER = 1


class Failed(Exception):
    """The scenario could not be played to its end."""


class Publisher:
    """publish.py of one rank, and the stages it announces."""

    def __init__(self, scenario, rank, folder, ports):
        self.folder = os.path.join(folder, f"rank-{rank}")
        os.mkdir(self.folder)
        self.truth, self.prompts = (os.path.join(self.folder, name) for name in ("truth.json", "prompts.jsonl"))
        replay = f"tcp://*:{ports[1]}" if scenario.has_replay else ""
        waits = 1 if scenario.daemon is Daemon.FIRST else 0
        self.command = [
            os.path.join(cache(), "venv/bin/python"), os.path.join(HERE, "publish.py"),
            "--engine", scenario.engine, "--version", scenario.version, "--block-size", str(BLOCK_SIZE),
            "--endpoint", f"tcp://*:{ports[0]}", "--replay-endpoint", replay, "--dp-rank", str(rank),
            "--truth", self.truth, "--prompts", self.prompts, "--wait-conns", str(waits), "--phase2", "150",
            *scenario.options,
        ]
        self.log = open(os.path.join(self.folder, "log"), "wb")
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log,
                                        text=True)
        self.stages = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.stages.put(line)
        self.stages.put("")

    def next_stage(self, name):
        try:
            line = self.stages.get(timeout=STAGE_PATIENCE_S)
        except queue.Empty:
            line = ""
        stage = json.loads(line) if line.startswith("{") else {}
        if stage.get("stage") != name:
            with open(self.log.name, encoding="utf-8", errors="replace") as file:
                raise Failed(f"the publisher is not {name}: {line}{file.read()[-2000:]}")
        return stage

    def publish_more(self):
        self.process.send_signal(signal.SIGUSR1)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def play(scenario):
    """Returns what was seen, as one flat object."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrouted-") as folder:
        ports = free_ports(2, len(scenario.ranks))
        daemon = daemons.Daemon(folder, workers(scenario, ports), BLOCK_SIZE, scenario.salts,
                                full_reports=scenario.full_reports)
        publishers = []
        try:
            if scenario.daemon is Daemon.FIRST:
                daemon.start()
            publishers += [Publisher(scenario, rank, folder, ports) for rank in scenario.ranks]
            listening = [one.next_stage("listening") for one in publishers]
            stages = [one.next_stage("published") for one in publishers]
            if scenario.daemon is not Daemon.FIRST:
                daemon.start()
            if scenario.daemon is Daemon.LIVE:
                for one in publishers:
                    one.publish_more()
                stages = [one.next_stage("published") for one in publishers]
            seen = settle(scenario, daemon, publishers, stages)
        finally:
            for one in publishers:
                one.stop()
            daemon.stop(signal.SIGKILL)
    described = {"scenario": scenario.name, "engine": scenario.engine, "version": scenario.version,
                 "cache": listening[0]["cache"], "replay": scenario.has_replay, "options": " ".join(scenario.options),
                 "daemon": scenario.daemon.value, "must": scenario.must.value}
    return {**described, **seen, "lost": sum(stage["lost"] for stage in stages),
            "passed": passes(scenario, seen), "seconds": round(time.monotonic() - began, 1)}


def workers(scenario, ports):
    """The --worker values, one a rank; the engines count their ports up from the base."""
    topic = ""
    if "--topic" in scenario.options:
        topic = ",topic=" + scenario.options[scenario.options.index("--topic") + 1]
    for rank in scenario.ranks:
        replay = f",replay=tcp://127.0.0.1:{ports[1] + rank}" if scenario.has_replay else ""
        yield f"id={WORKER},dp_rank={rank},endpoint=tcp://127.0.0.1:{ports[0] + rank}{replay}{topic}"


def settle(scenario, daemon, publishers, stages):
    """Compares until the answers are what they must be; else until they have not changed for a while."""
    deadline, before, rested = time.monotonic() + SETTLE_S_MAX, None, time.monotonic()
    while True:
        arrived = [daemon.status()[(WORKER, rank)] for rank in scenario.ranks]
        arrived = [int(one["last_seq"] if one["last_seq"] is not None else -1) for one in arrived]
        seen = compare(scenario, daemon, publishers)
        seen["behind"] = sum(abs(stage["last_seq"] - got) for stage, got in zip(stages, arrived))
        if scenario.daemon is Daemon.IDLE and not scenario.has_replay:
            seen["behind"] = 0  # there is nothing to be heard
        now = time.monotonic()
        if seen != before:
            before, rested = seen, now
        is_over = now > deadline or (now - rested > REST_S and not seen["behind"] and "recovering" not in seen["reasons"])
        if is_over or (scenario.must is Must.EXACT and passes(scenario, seen)):
            return seen
        time.sleep(0.1)


def compare(scenario, daemon, publishers):
    seen = dict.fromkeys(("prompts", "held", "held_in_host", "wrong", "wrong_on_device", "over", "under", "exact_and_wrong"), 0)
    trust, reasons = set(), set()
    for rank, publisher in zip(scenario.ranks, publishers):
        with open(publisher.truth, encoding="utf-8") as file:
            truth = json.load(file)["queries"]
        answers = daemon.query(publisher.prompts)
        if len(answers) != len(truth):
            raise Failed(f"{len(answers)} answers to {len(truth)} prompts")
        for query, candidates in zip(truth, answers):
            one = candidates[(WORKER, rank)]
            said = [one["overlap_blocks"][tier] for tier in ("device", "host")]
            held = [query["device_blocks"], query.get("host_blocks", 0)]
            trust.add(one["trust"])
            reasons.update(one["reasons"])
            seen["prompts"] += 1
            is_over = said[0] > held[0] or sum(said) > sum(held)
            seen["held"] += sum(held) > 0
            seen["held_in_host"] += held[1] > 0
            seen["over"] += is_over
            seen["wrong_on_device"] += said[0] != held[0]
            seen["under"] += said != held and not is_over
            seen["exact_and_wrong"] += said != held and one["trust"] == "exact"
    seen["wrong"] = seen["over"] + seen["under"]
    return {**seen, "trust": sorted(trust), "reasons": sorted(reasons)}


def passes(scenario, seen):
    """A worker that does not come to rest is wrong too."""
    is_at_rest = not seen["behind"] and "recovering" not in seen["reasons"]
    if scenario.must is Must.UNPROVEN:
        return is_at_rest and seen["held_in_host"] > 0 and not seen["wrong_on_device"] and seen["trust"] == ["unproven"]
    if seen["over"] or seen["exact_and_wrong"] or not is_at_rest or not seen["held"]:
        return False
    if "--offload" in scenario.options and not seen["held_in_host"]:
        return False  # nothing of what the row is about was there
    if scenario.must is Must.EXACT:
        return seen["wrong"] == 0 and seen["trust"] == ["exact"]
    return scenario.must is Must.BOUNDED or "exact" not in seen["trust"]
