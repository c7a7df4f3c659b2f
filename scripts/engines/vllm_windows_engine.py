"""vLLM's own KVCacheManager of a model with sliding windows beside full attention, driven as its scheduler drives it."""

import inspect

import loader
import vllm_engine
from vllm_engine import Adapter

# Its own modules beside those that vllm_engine needs.
MODULES = {
    "vllm.v1.core.kv_cache_coordinator", "vllm.v1.core.kv_cache_manager", "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.hisparse.block_pool",
}
RANDOM_LAYER = {"num_kv_heads": 1, "head_size": 1}


class Status:
    """Stands in for a request that is not preempted."""


class Request(vllm_engine.Request):
    """What the manager looks at beside what the pool does."""

    def __init__(self, prompt, lora, number):
        super().__init__(prompt, lora)
        self.request_id = f"r{number}"
        self.num_prompt_tokens = len(prompt.tokens)
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.shared_prefix_boundary = 0
        self.status = Status


class Engine(vllm_engine.Engine):
    """A scheduler's part of one engine core: groups of windows first, as where a model's first layer has one."""

    window_groups = 2
    request_class = Request

    def __init__(self, options, workload):
        loader.REAL["vllm"] |= MODULES
        super().__init__(options, workload)
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        common = {"block_size": options.block_size, "dtype": torch.float16, **RANDOM_LAYER}
        windows = [SlidingWindowSpec(**common, sliding_window=options.window)] if self.window_groups else []
        specs = windows * self.window_groups + [FullAttentionSpec(**common)]
        groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=options.capacity, kv_cache_tensors=[], kv_cache_groups=groups)
        # Versions differ in what they ask for.
        sizes = {"hash_block_size": options.block_size, "scheduler_block_size": options.block_size}
        known = inspect.signature(KVCacheManager.__init__).parameters
        self.manager = KVCacheManager(config, max_model_len=1 << 20, enable_caching=True, enable_kv_cache_events=True,
                                      **{name: size for name, size in sizes.items() if name in known})
        self.pool = self.manager.block_pool
        self.numbers = 0

    def held(self, prompt):
        """Whole blocks of `prompt` that a request would find: the manager's own answer."""
        return self.manager.get_computed_blocks(self._request(prompt))[1] // self.options.block_size

    def _request(self, prompt):
        self.numbers += 1
        request = self.request_class(prompt, Adapter(prompt.lora) if prompt.lora else None, self.numbers)
        request.block_hashes.extend(self.hash_blocks(request))
        return request

    def _prefill(self, request):
        """The prompt in chunks; the window leaves blocks behind between two."""
        found, computed = self.manager.get_computed_blocks(request)[:2]
        while request.num_computed_tokens < request.num_tokens:
            is_first = request.num_computed_tokens == 0
            fresh = min(request.num_tokens - request.num_computed_tokens - computed, self.options.chunk)
            self._allocate(request, fresh, computed if is_first else 0, found if is_first else None)
            request.num_computed_tokens += fresh + computed
            computed = 0
            yield from self._events()
        return request

    def _decode_one_block(self, request, _):
        size = self.options.block_size
        tokens = self.workload.tokens(size - request.num_tokens % size)
        request.all_token_ids += tokens
        request.block_hashes.extend(self.hash_blocks(request))
        self._allocate(request, len(tokens), 0, None)
        request.num_computed_tokens += len(tokens)
        yield from self._events()

    def _allocate(self, request, fresh, computed, found, **more):
        allocated = self.manager.allocate_slots(request, fresh, computed, found, **more)
        if allocated is None:
            raise MemoryError("the pool has no room for one request: more --capacity")
        return allocated

    def _finish(self, request, _):
        self.manager.free(request)

    def _events(self):
        events = self.manager.take_events()
        if events:
            yield events
