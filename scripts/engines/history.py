"""What an engine of chaos_engine.py holds at every moment of its life, computed a second time."""

from chaos_engine import BLOCK_SIZE, Settings, digest
from model_engine import Model, chain_of
from workload import Prompt

FOREVER = float("inf")
PROMPTS_RECENT = 24


class History:
    """One life of one engine. Equal settings give equal requests, so the sequence alone tells what it held."""

    def __init__(self, engine, seed, worker, life):
        settings = Settings(engine, seed, worker, life)
        self.workload = settings.workload()
        self.model = Model(settings, self.workload)
        self.steps = self.model.steps()
        self.last = -1
        # Of each digest: from which sequence it was held, and until which it was not any more.
        self.spans = {}

    def advance(self, last):
        """Plays on until the batch `last`."""
        while self.last < last:
            step = next(self.steps)
            self.last += 1
            gone = list(self.spans) if step.is_clear else step.evicted
            for one in gone:
                if self.spans[one][-1][1] == FOREVER:
                    self.spans[one][-1][1] = self.last
            for one in step.chain[step.first:]:
                self.spans.setdefault(one, []).append([self.last, FOREVER])

    def depths(self, prompt, first, last):
        """The fewest and the most leading blocks of `prompt` held after any of the batches first..last; -1 is before all."""
        self.advance(last)
        spans = [self.spans.get(one, []) for one in chain_of(prompt, BLOCK_SIZE)]
        all_depths = [depth(spans, seq) for seq in range(max(first, -1), max(last, -1) + 1)]
        return min(all_depths), max(all_depths)

    def prompts(self):
        """Prompts that tell right from wrong now: shared prefixes, what was asked last, and others' view of it."""
        asked = self.model.asked[-PROMPTS_RECENT:]
        foreign = [Prompt(one.tokens, "nobody", one.lora) for one in asked[-2:]]
        return [Prompt(prefix) for prefix in self.workload.prefixes] + asked + foreign

    def state(self, last):
        """As chaos_engine.py says it after the batch `last`."""
        self.advance(last)
        held = [one for one, spans in self.spans.items() if depth([spans], last)]
        return {"last_seq": last, "blocks": len(held), "digest": digest(held)}


def depth(spans, seq):
    count = 0
    for one in spans:
        if not any(first <= seq < until for first, until in one):
            break
        count += 1
    return count
