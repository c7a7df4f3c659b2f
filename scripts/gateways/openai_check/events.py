"""What an engine's own events say, read over its replay socket: which blocks it stored and removed, and when."""

import bisect
import collections

import msgspec
import zmq


class Events:
    def __init__(self, replay):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(replay)
        self.next = 0
        self.chain = {}  # (hash of the parent, tokens) -> hash
        self.stored, self.removed = collections.defaultdict(list), collections.defaultdict(list)  # hash -> times
        self.cleared = []

    def close(self):
        self.socket.close(0)

    def update(self):
        """Reads everything that was published until now."""
        self.socket.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            if not self.socket.poll(30_000):
                raise TimeoutError("the replay socket does not answer")
            frames = self.socket.recv_multipart()
            seq = int.from_bytes(frames[-2], "big", signed=True)
            if seq < 0:
                return
            self.next = seq + 1
            batch = msgspec.msgpack.decode(frames[-1])
            for event in batch[1]:
                self.take(batch[0], event)

    def take(self, time, event):
        if event["type"] == "AllBlocksCleared":
            self.cleared.append(time)
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.removed[name].append(time)
        else:
            size, parent = event["block_size"], event["parent_block_hash"]
            for at, name in enumerate(event["block_hashes"]):
                self.chain[parent, tuple(event["token_ids"][at * size : (at + 1) * size])] = name
                self.stored[name].append(time)
                parent = name

    def block(self, tokens, size, index):
        """The name of a prompt's block; None if the engine never had it."""
        name = None
        for at in range(index + 1):
            name = self.chain.get((name, tuple(tokens[at * size : (at + 1) * size])))
            if name is None:
                return None
        return name

    def explains(self, tokens, size, predicted, found, since, until):
        """Whether the first block in which both differ was stored, or removed, in that time."""
        name = self.block(tokens, size, min(predicted, found) // size)
        times = (self.stored if found > predicted else self.removed).get(name, [])
        return within(times, since, until) or (found < predicted and within(self.cleared, since, until))


def within(times, since, until):
    at = bisect.bisect_left(times, since)
    return at < len(times) and times[at] <= until
