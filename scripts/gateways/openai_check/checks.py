"""The phases of check-openai."""

import collections
import concurrent.futures
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time

from events import Events
from processes import Daemon, Engine, Gateway, Missing, Peer, post
from tap import Tap
from traffic import Texts, client, recording_client

__all__ = ["Missing", "run"]
# A daemon on a busy machine hears of a block so much later than the engine stored it.
LATE_S = 1.0


def ask(openai_client, args, name, messages, is_stream, output_tokens, wants_usage=True):
    """Sends one chat and reads the answer as a user of the package does. The usage, if the engine told it."""
    body = {"model": args.model, "messages": messages, "max_tokens": output_tokens, "temperature": 0,
            "extra_headers": {"x-check-id": name}}
    if not is_stream:
        return openai_client.chat.completions.create(**body).usage
    usage = None
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    for chunk in openai_client.chat.completions.create(stream=True, **options, **body):
        usage = chunk.usage or usage
    return usage


class Tapped:
    """The gateway between two recorders."""

    def __init__(self, args, folder, engines):
        self.args, self.engines = args, engines
        self.taps = [Tap(engine.url) for engine in engines]
        self.gateway = Gateway(args, folder, [tap.url for tap in self.taps], envoy=args.envoy)
        self.events = {engine.worker: Events(engine.replay) for engine in engines}
        self.compared = self.unequal = self.bytes = 0
        self.faults, self.lock = [], threading.Lock()

    def close(self):
        self.gateway.end()
        for tap in self.taps:
            tap.close()

    def fault(self, phase, **what):
        with self.lock:
            self.faults.append({"phase": phase} | what)
            print(json.dumps(self.faults[-1]), flush=True)

    def compare(self, phase, name, kept):
        """The caller's bytes and the engine's."""
        told = [answer for tap in self.taps for answer in tap.taken(name) if answer.path == "/v1/chat/completions"]
        with self.lock:
            self.compared, self.bytes = self.compared + 1, self.bytes + len(kept.body)
        if len(told) != 1 or (told[0].status, told[0].body) != (kept.status, kept.body) or told[0].kind != kept.headers.get("content-type"):
            self.fault(phase, kind="bytes", request=name, status=kept.status, here=len(kept.body), engine=[len(t.body) for t in told])

    def quiet(self):
        """Waits until the daemon has the last batch of every engine."""
        time.sleep(self.args.settle)
        for events in self.events.values():
            events.update()
        wanted = {worker: events.next - 1 for worker, events in self.events.items() if events.next}
        for _ in range(600):
            out = subprocess.run([self.args.kvrouted, "status", "--socket", self.gateway.socket, "--json"],
                                 capture_output=True, text=True, check=True).stdout
            heard = {int(worker["worker_id"]): worker["last_seq"] for worker in json.loads(out)["workers"]}
            if all(heard.get(worker) is not None and heard[worker] >= seq for worker, seq in wanted.items()):
                return
            time.sleep(0.02)
        self.fault("single", kind="the daemon does not hear the engines", wanted=wanted, heard=heard)

    def bookings(self):
        """Requests that the daemon believes to be running."""
        out = subprocess.run([self.args.kvrouted, "query", "--socket", self.gateway.socket, "--model", self.args.model,
                              "--tokens", "1", "--potential-loads", "--json"], capture_output=True, text=True, check=True).stdout
        return sum(worker["active_requests"] for worker in json.loads(out)["workers"])

    def predicted(self, kept, prompt_tokens):
        """Worker, and the cached tokens that its engine should report: it computes the last token of a prompt always."""
        size = self.engines[0].block_size
        overlap = kept.headers.get("x-kvrouted-overlap-tokens")
        worker = int(kept.headers["x-kvrouted-worker"].split("/")[0])
        return worker, None if overlap is None else min(int(overlap), (prompt_tokens - 1) // size * size)

    def outcomes(self, before, wait_s=5):
        """What the gateway's own watch said since `before`, once it has said something."""
        deadline = time.monotonic() + wait_s
        while True:
            now = self.gateway.counter("parity", "outcome")
            new = {outcome: count - before.get(outcome, 0) for outcome, count in now.items() if count > before.get(outcome, 0)}
            if new or time.monotonic() > deadline:
                return now, new
            time.sleep(0.005)


def single(tapped, args):
    openai_client, recorder = recording_client(tapped.gateway.url, 1)
    draw, talk = random.Random(args.seed), Texts(args.seed).endless(args.longest)
    said, trusts, cached, prompts = tapped.gateway.counter("parity", "outcome"), collections.Counter(), 0, 0
    exact = differ = 0
    for number in range(args.requests):
        tapped.quiet()
        name, messages = f"single-{args.seed}-{number}", next(talk)
        usage = ask(openai_client, args, name, messages, number % 2 == 1, draw.randint(1, 48))
        kept = recorder.taken(name)
        tapped.compare("single", name, kept)
        said, new = tapped.outcomes(said)
        trusts.update(new.keys() or ["not observed"])
        found = usage.prompt_tokens_details.cached_tokens or 0
        cached, prompts = cached + found, prompts + usage.prompt_tokens
        worker, wanted = tapped.predicted(kept, usage.prompt_tokens)
        if "not_compared" in new or not new:
            continue
        exact += 1
        if wanted != found:
            differ += 1
            tapped.fault("single", kind="prediction", request=name, worker=worker, predicted=wanted, engine=found)
    return {"requests": args.requests, "exact": exact, "differ": differ, "outcomes": dict(trusts), "cached_share": round(cached / prompts, 3)}


def many(tapped, args):
    openai_client, recorder = recording_client(tapped.gateway.url, args.at_once)
    draw, talk, lock = random.Random(args.seed + 1), Texts(args.seed + 1).endless(args.longest), threading.Lock()
    before = tapped.gateway.counter("parity", "outcome")
    jobs = [(f"many-{args.seed}-{number}", next(talk), number % 2 == 1, draw.randint(1, 64)) for number in range(args.requests)]
    seen, failed = [], []

    def one(name, messages, is_stream, output_tokens):
        since = time.time()
        try:
            # Every eighth stream has no usage, as most callers' streams.
            usage = ask(openai_client, args, name, messages, is_stream, output_tokens, wants_usage=hash(messages[-1]["content"][:9]) % 4 > 0)
        except Exception as error:  # noqa: BLE001: whatever the client says is a fault
            with lock:
                failed.append(f"{name}: {type(error).__name__}: {error}")
            return
        kept = recorder.taken(name)
        tapped.compare("many", name, kept)
        if usage is not None:
            with lock:
                seen.append((name, messages, since, time.time(), kept, usage))

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda job: one(*job), jobs))
    for text in failed:
        tapped.fault("many", kind="failed", text=text)
    tapped.quiet()
    result = explain(tapped, args, seen)
    after = tapped.gateway.counter("parity", "outcome")
    return {"requests": args.requests, "failed": len(failed), **result,
            "outcomes": {outcome: count - before.get(outcome, 0) for outcome, count in after.items()}}


def kill(tapped, args):
    """The first engine's process is killed while requests run there."""
    openai_client, recorder = recording_client(tapped.gateway.url, args.at_once)
    draw, talk, lock = random.Random(args.seed + 2), Texts(args.seed + 2).endless(args.longest), threading.Lock()
    # Half of the requests come after the engine is dead.
    count = min(args.requests, 240)
    jobs = [(f"kill-{args.seed}-{number}", next(talk), number % 2 == 1, draw.randint(16, 64)) for number in range(count)]
    done, result = [0], collections.Counter()

    def one(name, messages, is_stream, output_tokens):
        try:
            ask(openai_client, args, name, messages, is_stream, output_tokens)
            outcome = "whole"
        except Exception as error:  # noqa: BLE001: what it means depends on what had come
            kept = recorder.answers.get(name)
            outcome = "cut" if kept is not None and kept.status == 200 and kept.body else "failed"
            if outcome == "failed":
                tapped.fault("kill", kind="failed", request=name, status=kept and kept.status, text=f"{type(error).__name__}: {error}")
        with lock:
            result[outcome] += 1
            done[0] += 1
            if done[0] == count // 2:
                os.kill(args.kill, signal.SIGKILL)

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda job: one(*job), jobs))
    sent = [sum(tap.asked[job[0]] for tap in tapped.taps) for job in jobs]
    left, deadline = tapped.bookings(), time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = tapped.bookings()
    if left:
        tapped.fault("kill", kind="bookings stay", bookings=left)
    return {"requests": count, **result, "sent_again": sum(times > 1 for times in sent), "bookings_left": left}


def explain(tapped, args, seen):
    size, differ, explained, not_predicted = tapped.engines[0].block_size, 0, collections.Counter(), 0
    for name, messages, since, until, kept, usage in seen:
        worker, wanted = tapped.predicted(kept, usage.prompt_tokens)
        found = usage.prompt_tokens_details.cached_tokens or 0
        if wanted is None:
            not_predicted += 1
            continue
        if wanted == found:
            continue
        differ += 1
        engine = next(engine for engine in tapped.engines if engine.worker == worker)
        tokens = post(engine.url + "/tokenize", {"model": args.model, "messages": messages})["tokens"]
        if tapped.events[worker].explains(tokens, size, wanted, found, since - LATE_S, until):
            explained["stored meanwhile" if found > wanted else "evicted meanwhile"] += 1
        else:
            tapped.fault("many", kind="unexplained", request=name, worker=worker, predicted=wanted, engine=found,
                         prompt_tokens=len(tokens), since=since, until=until)
    return {"compared": len(seen), "not_predicted": not_predicted, "differ": differ, "explained": dict(explained)}


def rounds(args, folder, engines, peer):
    """Times of each contender, round by round: the gateway under each policy, and the peer."""
    contenders, children = {}, []
    try:
        for mode in args.modes.split():
            daemon = Daemon(args, folder, engines, mode)
            children.append(daemon)
            children.append(Gateway(args, folder, [f"{engine.worker}={engine.url}" for engine in engines], daemon.socket))
            contenders[mode] = children[-1].url
        if peer:
            children.append(Peer(peer, engines))
            contenders["sglang-router"] = children[-1].url
        else:
            print("skipped: sglang-router is not installed", flush=True)
        return measure(args, engines, contenders)
    finally:
        for child in reversed(children):
            child.end()


def measure(args, engines, contenders):
    found = {name: [] for name in contenders}
    for number in range(args.rounds):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for engine in engines:
                post(engine.url + "/reset_prefix_cache")
                # The engine tells it with its next step.
                post(engine.url + "/v1/completions", {"model": args.model, "prompt": [7, 8], "max_tokens": 1})
            time.sleep(1)
            one = one_round(args, contenders[name], args.seed + number)
            found[name].append(one)
            print(json.dumps({"round": number, "contender": name, **one}), flush=True)
    figures = ("first_token_ms_mean", "first_token_ms_p50", "whole_answer_ms_mean", "cached_share")
    median = lambda rounds, figure: round(statistics.median(one[figure] for one in rounds), 3)
    return {name: {figure: median(rounds, figure) for figure in figures}
                  | {"by_round": [one["first_token_ms_mean"] for one in rounds]} for name, rounds in found.items()}


def one_round(args, url, seed):
    """Conversations that share four system prompts of about 1700 tokens, some at once; each waits for its own answers."""
    openai_client, texts, lock = client(url, args.times_at_once), Texts(seed), threading.Lock()
    systems = [texts.piece(6000, 6001) for _ in range(4)]
    talks = [(texts.draw.choice(systems), [texts.piece(300, 1200) for _ in range(args.turns)]) for _ in range(args.conversations)]
    times, wholes, cached, asked = [], [], [], []

    def talk(conversation):
        messages = [{"role": "system", "content": conversation[0]}]
        for text in conversation[1]:
            messages.append({"role": "user", "content": text})
            began, first, answer = time.perf_counter(), None, ""
            for chunk in openai_client.chat.completions.create(model=args.model, messages=messages, max_tokens=args.answer_tokens, temperature=0, stream=True,
                                                               stream_options={"include_usage": True}):
                if chunk.choices and chunk.choices[0].delta.content is not None:
                    if chunk.choices[0].delta.content and first is None:
                        first = time.perf_counter() - began
                    answer += chunk.choices[0].delta.content
                if chunk.usage:
                    with lock:
                        cached.append(chunk.usage.prompt_tokens_details.cached_tokens or 0)
                        asked.append(chunk.usage.prompt_tokens)
            with lock:
                wholes.append(time.perf_counter() - began)
                times.append(first if first is not None else wholes[-1])
            messages.append({"role": "assistant", "content": answer})

    with concurrent.futures.ThreadPoolExecutor(args.times_at_once) as pool:
        list(pool.map(talk, talks))
    return {"requests": len(times), "first_token_ms_mean": round(statistics.mean(times) * 1e3),
            "first_token_ms_p50": round(statistics.median(times) * 1e3),
            "whole_answer_ms_mean": round(statistics.mean(wholes) * 1e3), "cached_share": round(sum(cached) / sum(asked), 3)}


def run(args, phases, folder, peer):
    engines = [Engine(number, url) for number, url in enumerate(args.engine, 1)]
    result, faults = {}, []
    if phases & {"single", "many", "kill"}:
        tapped = Tapped(args, folder, engines)
        try:
            for name, phase in (("single", single), ("many", many), ("kill", kill)):
                if name in phases:
                    began = time.monotonic()
                    result[name] = phase(tapped, args) | {"seconds": round(time.monotonic() - began)}
                    print(json.dumps({name: result[name]}), flush=True)
            # A killed engine is a finding too.
            for finding in [] if "kill" in phases else tapped.gateway.findings():
                tapped.fault("findings", **finding)
        finally:
            tapped.close()
        faults = tapped.faults
        result["bytes"] = {"answers": tapped.compared, "bytes": tapped.bytes, "differ": sum(fault.get("kind") == "bytes" for fault in faults)}
    if "times" in phases:
        result["times"] = rounds(args, folder, engines, peer)
    print(json.dumps(result | {"faults": len(faults)}), flush=True)
    return 1 if faults else 0
