"""SGLang's own RadixCache, page hashes, ZmqEventPublisher and load publisher, driven as its scheduler drives them."""

import hashlib
import json
from array import array
from types import SimpleNamespace

import loader
from workload import Prompt


class Indices(list):
    """A list in place of the one-dimensional tensor of KV slots that a tree node keeps."""

    def __getitem__(self, at):
        got = super().__getitem__(at)
        return Indices(got) if isinstance(at, slice) else got

    def clone(self):
        return Indices(self)

    def to(self, *_, **__):
        return Indices(self)

    def numel(self):
        return len(self)


class Slots:
    """An allocator that has nothing to give back to."""

    device = "cpu"

    def free(self, _):
        pass

    def free_segment(self, _, start_pos=0):
        pass


def prepare_stand_ins():
    """The few names of inert modules that the tree does call."""
    import sglang.srt.utils.common as common
    import sglang.srt.utils.cpp_extension_loader as extensions
    import torch
    torch.tensor = lambda values, **_: Indices(values)
    torch.empty = lambda _, **__: Indices()
    torch.cat = lambda parts, **_: Indices(slot for part in parts for slot in part)
    common.ceil_align = lambda value, to: -(-value // to) * to
    page_hash = loader.native_page_hash()
    extensions.load_extension_with_recovery = lambda **_: page_hash


def adapter_key(name):
    """The id SGLang gives a loaded adapter: 32 hexadecimal digits, the end of a request's extra key."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


class Engine:
    """One SGLang scheduler's prefix cache and its publisher."""

    def __init__(self, options, workload):
        loader.install("sglang", options.version)
        prepare_stand_ins()
        from sglang.srt.mem_cache import base_prefix_cache, events, radix_cache
        self.options, self.workload = options, workload
        self.api, self.radix = base_prefix_cache, radix_cache
        self.adapters = events.KvEventLoraNames()
        self.tree = radix_cache.RadixCache.create_simulated(
            mock_allocator=Slots(), page_size=options.block_size, enable_kv_cache_events=True,
            kv_event_lora_names=self.adapters)
        self.tree.update_eviction_metrics = lambda *_: None  # create_simulated makes no collector
        self.asked = []
        self.load_publisher = None

    def publisher(self):
        from sglang.srt.disaggregation.kv_events import EventPublisherFactory
        o = self.options
        config = {"publisher": "zmq", "endpoint": o.endpoint, "buffer_steps": o.buffer_steps, "topic": o.topic}
        if o.replay_endpoint:
            config["replay_endpoint"] = o.replay_endpoint
        return EventPublisherFactory.create(json.dumps(config), o.dp_rank)

    def say_load(self, running):
        """Publishes how busy it is: so many requests running, and what the tree holds as the tokens in use."""
        if self.load_publisher is None:
            self.load_publisher = self._load_publisher()
        capacity = self.options.capacity * self.options.block_size
        load = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=running // 2, num_used_tokens=self.tree.total_size(),
            max_total_num_tokens=capacity, num_waiting_uncached_tokens=100 * running,
            num_total_tokens=self.tree.total_size() + 100 * running, max_running_requests=256,
            total_prefill_uncached_tokens=0, total_prefill_busy_us=0)
        self.load_publisher.publish_load_stat(lambda: load, force=True)

    def _load_publisher(self):
        import sglang.srt.runtime_context as context
        parallel = SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0, attn_dp_size=1, attn_dp_rank=0,
                                   dp_rank=self.options.dp_rank, num_dp_ranks=self.options.dp_rank + 1)
        context.get_parallel = lambda: parallel
        from sglang.srt.disaggregation import kv_events
        from sglang.srt.managers.scheduler_components import load_publisher
        kv_events.get_parallel = load_publisher.get_parallel = lambda: parallel
        o = self.options
        config = {"publisher": "zmq", "endpoint": o.endpoint, "topic": o.topic}
        if o.replay_endpoint:
            config["replay_endpoint"] = o.replay_endpoint
        made = load_publisher.SchedulerLoadPublisher(
            kv_events_config=json.dumps(config), load_publish_endpoint=o.load_endpoint)
        if not made.enable:
            raise SystemExit("publish.py: SGLang declines --load-endpoint " + o.load_endpoint)
        return made

    def batch(self, time_s, events):
        from sglang.srt.disaggregation.kv_events import KVEventBatch
        return KVEventBatch(ts=time_s, events=events)

    def steps(self):
        """Runs requests for ever; yields the events of each scheduler step that had any."""
        requests = 0
        while True:
            prompt, decode_blocks = self.workload.next()
            requests += 1
            if prompt.lora:
                self.adapters.register(lora_id=adapter_key(prompt.lora), lora_name=prompt.lora)
                self.adapters.register(AdapterRequest(prompt.lora), prompt.lora)
            self._compute(prompt)
            yield from self._events()
            if decode_blocks:
                answer = self.workload.tokens(decode_blocks * self.options.block_size)
                prompt = Prompt(prompt.tokens + answer, prompt.salt, prompt.lora)
                self._compute(prompt)
                yield from self._events()
            self.asked.append(prompt)
            if self.options.clear_every and requests % self.options.clear_every == 0:
                self.tree.reset()
                yield from self._events()

    def held(self, prompt):
        """Leading whole blocks of `prompt` that the tree would reuse."""
        return self._match(prompt).device_prefix_len // self.options.block_size

    def cached_blocks(self):
        return self.tree.total_size() // self.options.block_size

    def _key(self, prompt):
        return self.radix.RadixKey(array("q", prompt.tokens), cache_salt=prompt.salt,
                                   extra_key=adapter_key(prompt.lora) if prompt.lora else None)

    def _match(self, prompt):
        return self.tree.match_prefix(self.api.MatchPrefixParams(key=self._key(prompt)))

    def _compute(self, prompt):
        """Makes room, with the matched prefix locked against eviction, then stores what was computed."""
        size = self.options.block_size
        matched = self._match(prompt)
        self.tree.inc_lock_ref(matched.last_device_node)
        wanted = len(prompt.tokens) // size * size - matched.device_prefix_len
        free = self.options.capacity * size - self.tree.total_size()
        if wanted > free:
            self.tree.evict(self.api.EvictParams(num_tokens=wanted - free))
        self.tree.insert(self.api.InsertParams(key=self._key(prompt)))
        self.tree.dec_lock_ref(matched.last_device_node)

    def _events(self):
        events = self.tree.kv_events.take()
        if events:
            yield events


class AdapterRequest:
    """The attributes of SGLang's Req that name an adapter's namespace."""

    def __init__(self, name):
        self.lora_id = self.extra_key = adapter_key(name)
