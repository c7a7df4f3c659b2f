"""A simulated engine that publishes its cache as vLLM does."""

import hashlib
import itertools
import socket
import struct
import threading
import time

BLOCK_TOKENS = 16
#: Blocks of a simulated engine, after which it clears its cache.
CAPACITY_BLOCKS = 1500


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def packed(value) -> bytes:
    """A value in msgpack, of the kinds that batches have."""
    match value:
        case None:
            return b"\xc0"
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case int() if value < 128:
            return bytes([value])
        case int():
            return b"\xcf" + value.to_bytes(8, "big")
        case str():
            text = value.encode()
            return b"\xd9" + bytes([len(text)]) + text
        case list():
            return b"\xdc" + len(value).to_bytes(2, "big") + b"".join(map(packed, value))
        case dict():
            pairs = b"".join(packed(key) + packed(entry) for key, entry in value.items())
            return b"\xde" + len(value).to_bytes(2, "big") + pairs
    raise TypeError(value)


def frame(body: bytes, more: bool) -> bytes:
    if len(body) < 256:
        return bytes([int(more), len(body)]) + body
    return bytes([2 | int(more)]) + len(body).to_bytes(8, "big") + body


class Engine:
    """The cache of an engine, and its publisher: ZeroMQ's PUB socket by ZMTP 3.0, with vLLM's batches."""

    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"

    PONG = b"\x04\x05\x04PONG"

    def __init__(self, worker: int, host: str = "127.0.0.1", port: int | None = None):
        self.worker, self.host, self.port = worker, host, port or free_port()
        self.lock = threading.RLock()
        self.start()

    def start(self):
        """A new process of the engine: an empty cache, and batches from 0 on."""
        self.sequence, self.held, self.peers, self.is_silent = 0, set(), [], False
        self.listener = socket.create_server((self.host, self.port))
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def accept(self, listener: socket.socket):
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer: socket.socket):
        try:
            peer.sendall(self.GREETING + self.READY)
            # The other side's greeting, its READY and its subscription; what follows is ignored.
            received = b""
            while len(received) < 64 + len(self.READY):
                received += peer.recv(4096) or self.broken()
            with self.lock:
                self.peers.append(peer)
            # While nothing is published, the other side asks for signs of life.
            while received := peer.recv(4096):
                if b"\x04PING" in received:
                    with self.lock:
                        peer.sendall(self.PONG)
        except OSError:
            pass
        with self.lock:
            if peer in self.peers:
                self.peers.remove(peer)

    @staticmethod
    def broken():
        raise ConnectionError

    def publish(self, *events: dict):
        with self.lock:
            batch = packed([time.time(), list(events), 0])
            message = frame(b"", True) + frame(self.sequence.to_bytes(8, "big"), True) + frame(batch, False)
            self.sequence += 1
            for peer in list(self.peers):
                try:
                    peer.sendall(message)
                except OSError:
                    self.peers.remove(peer)

    def lose(self):
        """A batch that reaches no subscriber."""
        with self.lock:
            self.sequence += 1

    def clear(self):
        with self.lock:
            self.held.clear()
            self.publish({"type": "AllBlocksCleared"})

    def run(self, tokens: list) -> int:
        """Stores the whole blocks of a prompt. Returns the tokens that were not cached."""
        names, name = [], b""
        for at in range(0, len(tokens) - len(tokens) % BLOCK_TOKENS, BLOCK_TOKENS):
            block = repr(tokens[at:at + BLOCK_TOKENS]).encode()
            name = hashlib.blake2b(name + block, digest_size=8).digest()
            names.append(int.from_bytes(name, "big"))
        with self.lock:
            if self.is_silent:
                return len(tokens)
            if len(self.held) > CAPACITY_BLOCKS:
                self.clear()
            cached = len(list(itertools.takewhile(self.held.__contains__, names)))
            if cached < len(names):
                new = tokens[cached * BLOCK_TOKENS:len(names) * BLOCK_TOKENS]
                self.held.update(names)
                self.publish({"type": "BlockStored", "block_hashes": names[cached:],
                              "parent_block_hash": names[cached - 1] if cached else None, "token_ids": new,
                              "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None})
            return len(tokens) - cached * BLOCK_TOKENS

    def kill(self):
        with self.lock:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            for peer in self.peers:
                peer.close()
            self.peers = []
