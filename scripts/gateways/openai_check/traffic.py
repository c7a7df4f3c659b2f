"""Conversations, and the `openai` client that sends them and keeps the bytes of what comes back."""

import pathlib
import random
import sysconfig
import threading

import openai

transport_of = openai.DefaultHttpxClient.__mro__
http = __import__(next(base.__module__ for base in transport_of if base.__name__ == "Client").split(".")[0])


class Recorder(http.HTTPTransport):
    """Keeps status, headers and undecoded body of each answer, by the check's name for the request."""

    def __init__(self, **options):
        super().__init__(**options)
        self.answers, self.lock = {}, threading.Lock()

    def handle_request(self, request):
        reply = super().handle_request(request)
        kept = Kept(reply, reply.stream)
        reply.stream = kept
        with self.lock:
            self.answers[request.headers["x-check-id"]] = kept
        return reply

    def taken(self, name):
        with self.lock:
            return self.answers.pop(name)


class Kept(http.SyncByteStream):
    def __init__(self, reply, stream):
        self.status, self.headers, self.stream, self.body = reply.status_code, reply.headers, stream, b""

    def __iter__(self):
        for part in self.stream:
            self.body += part
            yield part

    def close(self):
        self.stream.close()


def client(url, at_once, transport=None):
    limits = http.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    transport = transport or http.HTTPTransport(limits=limits)
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300,
                         http_client=http.Client(transport=transport, timeout=300))


def recording_client(url, at_once):
    recorder = Recorder(limits=http.Limits(max_connections=at_once, max_keepalive_connections=at_once))
    return client(url, at_once, recorder), recorder


class Texts:
    """Pieces of Python's own library: text with structure, the same on every machine with that version."""

    def __init__(self, seed):
        library = pathlib.Path(sysconfig.get_paths()["stdlib"])
        self.text = "\n".join(path.read_text(errors="replace") for path in sorted(library.glob("*.py"))[:60])
        self.draw = random.Random(seed)

    def piece(self, low, high):
        start, size = self.draw.randrange(len(self.text) - high), self.draw.randint(low, high)
        return self.text[start : start + size]

    def endless(self, longest):
        """Messages of conversations with five system prompts, each a turn longer than the last; `answer` is for the caller."""
        systems = [self.piece(600, 4000) for _ in range(5)]
        alive = []
        while True:
            if alive and self.draw.random() < 0.6:
                messages = alive.pop(self.draw.randrange(len(alive)))
            else:
                messages = [{"role": "system", "content": self.draw.choice(systems)}]
            messages = messages + [{"role": "user", "content": self.piece(20, 1500)}]
            yield messages
            if sum(len(message["content"]) for message in messages) < longest:
                alive.append(messages + [{"role": "assistant", "content": self.piece(5, 400)}])
