"""The synthetic requests that the engines' caches are driven with. The same seed gives the same requests."""

import random
from dataclasses import dataclass
from typing import Optional

VOCABULARY = 128_000
SHARED_PREFIXES = 16
PREFIX_BLOCKS_MAX = 8
SUFFIX_BLOCKS_MAX = 6
DECODE_BLOCKS_MAX = 4
TENANTS = 4
ADAPTERS = 3


@dataclass
class Prompt:
    """What a gateway would ask about: tokens, and what separates them from equal tokens."""

    tokens: list
    salt: Optional[str] = None
    lora: Optional[str] = None


class Workload:
    """Shared prefixes of 1 to 8 blocks, skewed, then a private part that does not end on a block."""

    def __init__(self, options, life=""):
        """`life` tells apart what one engine is asked after it began anew; the shared prefixes stay."""
        self.block_size = options.block_size
        self.salt_ratio, self.lora_ratio, self.dup_ratio = options.salt_ratio, options.lora_ratio, options.dup_ratio
        self.random = random.Random(f"{options.engine}/{options.seed}/{options.dp_rank}{life}")
        shared = random.Random(f"prefixes/{options.seed}")
        self.prefixes = [
            [shared.randrange(VOCABULARY) for _ in range(self.block_size * shared.randint(1, PREFIX_BLOCKS_MAX))]
            for _ in range(SHARED_PREFIXES)
        ]
        self.recent = []

    def tokens(self, count):
        """Tokens nobody else has."""
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def next(self):
        """The next request: its prompt, and how many blocks its answer will fill."""
        r = self.random
        if self.recent and r.random() < self.dup_ratio:
            # A repeat that ends on a block: engines compute the last token again, so the last block is
            # stored a second time although it is cached.
            old = r.choice(self.recent[-8:])
            whole = len(old.tokens) // self.block_size * self.block_size
            return Prompt(old.tokens[:whole], old.salt, old.lora), 0
        prefix = self.prefixes[min(int(r.expovariate(4 / SHARED_PREFIXES)), SHARED_PREFIXES - 1)]
        own = self.block_size * r.randint(1, SUFFIX_BLOCKS_MAX) + r.randrange(self.block_size)
        prompt = Prompt(prefix + self.tokens(own))
        if r.random() < self.salt_ratio:
            prompt.salt = f"tenant-{r.randrange(TENANTS)}"
        if r.random() < self.lora_ratio:
            prompt.lora = f"adapter-{r.randrange(ADAPTERS)}"
        self.recent = [*self.recent[-7:], prompt]
        return prompt, r.randint(0, DECODE_BLOCKS_MAX)
