"""What goes wrong on purpose between an engine's publisher and whoever listens."""

import random


class LossySocket:
    """The publisher's socket, except that batches with the sequences `lost` are never sent.

    The engine's publisher does not notice: it keeps them for replay like every other batch.
    """

    def __init__(self, socket, lost):
        self.socket, self.lost, self.lost_times = socket, frozenset(lost), 0

    def __getattr__(self, name):
        return getattr(self.socket, name)

    def send_multipart(self, frames, *args, **kwargs):
        if int.from_bytes(frames[-2], "big") in self.lost:
            self.lost_times += 1
            return None
        return self.socket.send_multipart(frames, *args, **kwargs)


def sequences_lost(count, run, batches, seed):
    """`count` sequences in runs of `run`, none of the last three: what is lost last shows only with the next batch."""
    draws, lost = random.Random(f"lost/{seed}"), set()
    last = batches - 4
    while len(lost) < min(count, max(last, 0)):
        begin = draws.randint(1, last)
        lost.update(range(begin, min(begin + run, begin + count - len(lost), last + 1)))
    return lost
