"""vLLM's own BlockPool, block hashes and ZmqEventPublisher, driven as its scheduler drives them."""

import os
import random

import loader
from workload import Prompt


class Request:
    """Stands in for a scheduled request: what block hashing and the pool look at, nothing else."""

    def __init__(self, prompt, lora):
        self.request_id = "r"
        self.all_token_ids = list(prompt.tokens)
        self.cache_salt = prompt.salt
        self.lora_request = lora
        self.block_hashes = []
        self.mm_features = []
        self.prompt_embeds = None
        self._prompt_embeds_per_block_hashes = {}
        self.session_id = None

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Adapter:
    """Stands in for a LoRARequest."""

    def __init__(self, name):
        self.adapter_id = 1 + int(name.rpartition("-")[2])
        self.name = self.lora_name = name
        self.lora_path = f"adapters/{name}"


class Engine:
    """One vLLM engine core's prefix cache and its publisher."""

    def __init__(self, options, workload):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0" if options.bytes_hashes else "1"
        loader.install("vllm", options.version)
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import block_pool, kv_cache_utils
        self.options, self.workload = options, workload
        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self.hash_blocks = kv_cache_utils.get_request_block_hasher(options.block_size, hash_function)
        # One block of the pool is vLLM's null block and never cached.
        self.pool = block_pool.BlockPool(options.capacity, True, options.block_size, enable_kv_cache_events=True)
        self.asked = []
        self.random = random.Random(f"requests/{options.seed}")

    def publisher(self):
        from vllm.config.kv_events import KVEventsConfig
        from vllm.distributed.kv_events import EventPublisherFactory
        o = self.options
        config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=o.endpoint,
                                replay_endpoint=o.replay_endpoint or None, buffer_steps=o.buffer_steps, topic=o.topic)
        return EventPublisherFactory.create(config, o.dp_rank)

    def batch(self, time_s, events):
        from vllm.distributed.kv_events import KVEventBatch
        return KVEventBatch(ts=time_s, events=events)

    def steps(self):
        """Runs requests for ever; yields the events of each scheduler step that had any."""
        requests = 0
        while True:
            prompt, decode_blocks = self.workload.next()
            request = self._request(prompt)
            request.skip_reading_prefix_cache = self.random.random() < self.options.anew_ratio
            requests += 1
            blocks = yield from self._prefill(request)
            for _ in range(decode_blocks):
                yield from self._decode_one_block(request, blocks)
            self._finish(request, blocks)
            self.asked.append(Prompt(request.all_token_ids, prompt.salt, prompt.lora))
            if self.options.clear_every and requests % self.options.clear_every == 0:
                self._clear()
                yield from self._events()

    def _clear(self):
        self.pool.reset_prefix_cache()

    def _finish(self, _, blocks):
        self.pool.free_blocks(reversed(blocks))

    def held(self, prompt):
        """Leading whole blocks of `prompt` that the pool would reuse."""
        count = 0
        for block_hash in self._request(prompt).block_hashes:
            if not self.pool.get_cached_block(block_hash, [0]):
                break
            count += 1
        return count

    def cached_blocks(self):
        return len(self.pool.cached_block_hash_to_block)

    def _request(self, prompt):
        request = Request(prompt, Adapter(prompt.lora) if prompt.lora else None)
        request.block_hashes.extend(self.hash_blocks(request))
        return request

    def _prefill(self, request):
        """Computes a prompt; yields the events of each step, and returns its blocks."""
        size = self.options.block_size
        cached = []
        # The last token is always computed, so a prompt's last whole block is never a hit when it ends there.
        for block_hash in request.block_hashes[:(request.num_tokens - 1) // size]:
            found = self.pool.get_cached_block(block_hash, [0])
            if request.skip_reading_prefix_cache or not found:
                break
            cached.append(found[0])
        self.pool.touch(cached)
        blocks = cached + self.pool.get_new_blocks(-(-request.num_tokens // size) - len(cached))
        self.pool.cache_full_blocks(request, blocks, len(cached), request.num_tokens // size, size, 0)
        yield from self._events()
        return blocks

    def _decode_one_block(self, request, blocks):
        """Generates tokens until one more block is full."""
        size = self.options.block_size
        if request.num_tokens == len(blocks) * size:
            blocks += self.pool.get_new_blocks(1)
        request.all_token_ids += self.workload.tokens(size - request.num_tokens % size)
        request.block_hashes.extend(self.hash_blocks(request))
        full = request.num_tokens // size
        self.pool.cache_full_blocks(request, blocks, full - 1, full, size, 0)
        yield from self._events()

    def _events(self):
        events = self.pool.take_events()
        for event in events:
            if type(event).__name__ == "BlockStored" and hasattr(event, "kv_cache_spec_kind"):
                event.kv_cache_spec_kind = "full_attention"  # as KVCacheManager says of its one group
        if events:
            yield events
