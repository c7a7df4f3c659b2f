"""Made by scripts/gen-schemas from schemas/routing.fbs. Do not edit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The terms of a cost, in the order of the computation. Blocks, unless noted."""

    request_blocks: float
    #: tokens
    cached_tokens: float
    effective_overlap: float
    #: tokens
    active_prefill_tokens: float
    #: factor in (0, 1]
    decay: float
    device_credit: float
    host_credit: float
    disk_credit: float
    shared_credit: float
    prefill: float
    active_decode_blocks: float
    additional_decode_blocks: float
    decode: float
    #: requests
    active_requests: float
    active_requests_cost: float
    #: factor
    capability_weight: float
    #: factor
    taint_factor: float
    cost: float
    #: factor: below 1 if the request's session is bound to the worker
    affinity_factor: float = 1.0
    #: blocks of the prompt that the worker does not hold yet, but computes for other requests
    in_flight_blocks: float = 0.0
    #: seconds: predicted rest of the prefills booked before this one
    queue_s: float = 0.0
    #: seconds: predicted prefill of this prompt
    prefill_s: float = 0.0
    #: seconds: predicted fetch of blocks from below the device's memory
    fetch_s: float = 0.0
    #: seconds: weighted delay of the worker's other requests by this prefill
    delay_s: float = 0.0
    #: seconds: weighted delay of requests that come later by this prefill
    later_delay_s: float = 0.0
    #: seconds: weighted delay of this request's output by other prefills on the worker
    output_delay_s: float = 0.0
