"""vLLM's own KVCacheManager beside its own offloading connector, driven as its scheduler drives both.

Real: the connector's scheduler side, its events and the manager of its blocks in host memory. Ours: the transfers
between device and host. A block that is stored is said so one to three steps later, as transfers take their time.
"""

import random
from types import SimpleNamespace

import loader
import vllm_engine
import vllm_windows_engine

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
# Its own modules beside those that vllm_windows_engine needs.
MODULES = {
    f"{OFFLOADING}.common", f"{OFFLOADING}.config", f"{OFFLOADING}.events", f"{OFFLOADING}.metrics", f"{OFFLOADING}.scheduler",
    "vllm.distributed.kv_transfer.kv_connector.utils", "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.config", "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.cpu.manager", "vllm.v1.kv_offload.cpu.policies", "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.request",
}
STEPS_OF_A_STORE_MAX = 3


class Request(vllm_windows_engine.Request):
    """What the connector looks at beside what the manager does."""

    kv_transfer_params = kv_hints = None
    finished = False

    @property
    def num_output_tokens(self):
        return self.num_tokens - self.num_prompt_tokens

    def is_finished(self):
        return self.finished


class Step:
    """Stands in for a SchedulerOutput: what the connector reads of one."""

    preempted_req_ids = kv_cache_block_copies = ()
    kv_connector_block_state = None

    def __init__(self, finished):
        self.scheduled_new_reqs, self.num_scheduled_tokens, self.finished_req_ids = [], {}, finished
        self.scheduled_cached_reqs = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())

    def schedule(self, request, tokens, block_ids, is_first):
        self.num_scheduled_tokens[request.request_id] = tokens
        if is_first:
            self.scheduled_new_reqs.append(SimpleNamespace(req_id=request.request_id, block_ids=block_ids))
        else:
            self.scheduled_cached_reqs.req_ids.append(request.request_id)
            self.scheduled_cached_reqs.new_block_ids.append(block_ids)


class Engine(vllm_windows_engine.Engine):
    """A scheduler's part of one engine core with one group of full attention, and its connector."""

    window_groups = 0
    request_class = Request

    def __init__(self, options, workload):
        loader.REAL["vllm"] |= MODULES
        super().__init__(options, workload)
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        self.reported = OffloadingWorkerMetadata
        self.delays = random.Random(f"offload/{options.seed}")
        self.connector = self._connector()
        # Transfers on their way: the job, and after how many steps more it is done.
        self.transfers, self.finished, self.clears = {}, set(), 0

    def _connector(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
        from vllm.v1 import kv_cache_interface
        from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
        from vllm.v1.kv_offload.config import OffloadingGroupConfig
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
        o = self.options
        kv_cache_interface.get_dtype_size = lambda _: 2  # torch, which says it, is not here
        group = OffloadingGroupConfig(tokens_per_block=o.block_size, layer_names=("layer.0",), group_id=0)
        spec = SimpleNamespace(
            config=SimpleNamespace(groups=(group,)), blocks_per_chunk=o.offload_chunk, tokens_per_hash=o.block_size,
            tokens_per_block=(o.block_size,), offload_prompt_only=True, extra_config={},
            kv_events_config=OffloadingKVEventsConfig(True, not o.offload_hashes_only),
            get_manager=lambda: CPUOffloadingManager(o.offload // o.offload_chunk, enable_events=True))
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            speculative_config=None, parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1))
        return OffloadingConnectorScheduler(spec, vllm_config, self.manager.kv_cache_config)

    def held(self, prompt):
        return vllm_engine.Engine.held(self, prompt)

    def host_held(self, prompt):
        """Whole blocks that a request would load from host memory, behind those that it finds on the device."""
        from vllm.v1.kv_offload.base import LookupResult, make_offload_key
        chunk, found = self.options.offload_chunk, self.held(prompt)
        hashes, first = self._request(prompt).block_hashes, found
        while (last := found // chunk * chunk + chunk - 1) < len(hashes):
            if self.connector.manager.lookup(make_offload_key(hashes[last], 0), None) is not LookupResult.HIT:
                break
            found = last + 1
        return found - first

    def _prefill(self, request):
        self.connector.on_new_request(request)
        found, computed = self.manager.get_computed_blocks(request)[:2]
        loaded, is_later = self.connector.get_num_new_matched_tokens(request, computed)
        if loaded:
            assert is_later
            self._allocate(request, 0, computed, found, num_external_computed_tokens=loaded, delay_cache_blocks=True)
            self.connector.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), loaded)
            request.num_computed_tokens = computed + loaded
            yield from self._step(Step(self._take_finished()), loads_end=True)
            # What came from host memory is in the device's cache from now on.
            self.manager.cache_blocks(request, request.num_computed_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            fresh = request.num_tokens - request.num_computed_tokens
            self._allocate(request, fresh, 0, None)
        else:
            fresh = request.num_tokens - computed
            self._allocate(request, fresh, computed, found)
            self.connector.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), 0)
            request.num_computed_tokens = computed
        step = Step(self._take_finished())
        step.schedule(request, fresh, self.manager.get_block_ids(request.request_id), True)
        yield from self._step(step)
        request.num_computed_tokens += fresh
        return request

    def _decode_one_block(self, request, _):
        size = self.options.block_size
        tokens = self.workload.tokens(size - request.num_tokens % size)
        request.all_token_ids += tokens
        request.block_hashes.extend(self.hash_blocks(request))
        fresh = self._allocate(request, len(tokens), 0, None)
        step = Step(self._take_finished())
        step.schedule(request, len(tokens), fresh.get_block_ids(), False)
        yield from self._step(step)
        request.num_computed_tokens += len(tokens)

    def _finish(self, request, _):
        request.finished = True
        self.connector.request_finished(request)
        self.manager.free(request)
        self.finished.add(request.request_id)

    def _clear(self):
        """What POST /reset_prefix_cache does: device memory alone, and each third time the connector's too."""
        self.pool.reset_prefix_cache()
        self.clears += 1
        if self.clears % 3 == 0:
            self.connector.reset_cache()

    def _take_finished(self):
        finished, self.finished = self.finished, set()
        return finished

    def _step(self, step, loads_end=False):
        """The connector's part of a step, the transfers that end with it, and the events of both caches."""
        work = self.connector.build_connector_meta(step)
        for job in work.store_jobs:
            self.transfers[job] = self.delays.randint(1, STEPS_OF_A_STORE_MAX)
        ended = set(work.load_jobs) if loads_end else set()
        # A store whose blocks are used for something else is waited for.
        ended |= {job for job, steps in self.transfers.items() if steps == 0 or job in (work.jobs_to_flush or ())}
        self.transfers = {job: steps - 1 for job, steps in self.transfers.items() if job not in ended}
        report = self.reported(completed_jobs={job: 1 for job in sorted(ended)})
        self.connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        yield from self._events()

    def _events(self):
        events = [*self.manager.take_events(), *self.connector.take_events()]
        if events:
            yield events
