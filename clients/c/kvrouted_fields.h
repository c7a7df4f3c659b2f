/* Made by scripts/gen-schemas from schemas/routing.fbs. Do not edit.
 *
 * KVR__KIND_X       the kind of a frame
 * KVR__T_F          the number of the field F in the table T; KVR__T_FIELD_COUNT is the number of T's fields
 * KVR__S_F_AT       the offset of the field F in the struct S, in bytes; KVR__S_BYTES is the size of S
 * KVR__E_V          the value V of the enum E
 */
#ifndef KVROUTED_FIELDS_H
#define KVROUTED_FIELDS_H

/* enum Kind */
enum {
    KVR__KIND_NONE = 0,
    KVR__KIND_HELLO = 1,
    KVR__KIND_HELLO_REPLY = 2,
    KVR__KIND_ROUTE = 3,
    KVR__KIND_ROUTE_REPLY = 4,
    KVR__KIND_PREFILL_COMPLETE = 5,
    KVR__KIND_PREFILL_COMPLETE_REPLY = 6,
    KVR__KIND_FREE = 7,
    KVR__KIND_FREE_REPLY = 8,
    KVR__KIND_OUTPUT_PROGRESS = 9,
    KVR__KIND_OUTPUT_PROGRESS_REPLY = 10,
    KVR__KIND_SERVED = 11,
    KVR__KIND_SERVED_REPLY = 12,
    KVR__KIND_REPORT_FAILURE = 13,
    KVR__KIND_REPORT_FAILURE_REPLY = 14,
    KVR__KIND_REPORT_LOAD = 15,
    KVR__KIND_REPORT_LOAD_REPLY = 16,
    KVR__KIND_POTENTIAL_LOADS = 17,
    KVR__KIND_POTENTIAL_LOADS_REPLY = 18,
    KVR__KIND_OVERLAP = 19,
    KVR__KIND_OVERLAP_REPLY = 20,
    KVR__KIND_WORKERS = 21,
    KVR__KIND_WORKERS_REPLY = 22,
    KVR__KIND_WATCH = 23,
    KVR__KIND_WATCH_REPLY = 24,
    KVR__KIND_STATUS = 25,
    KVR__KIND_STATUS_REPLY = 26,
    KVR__KIND_CHANGE_WORKER = 27,
    KVR__KIND_CHANGE_WORKER_REPLY = 28,
    KVR__KIND_RESET = 29,
    KVR__KIND_RESET_REPLY = 30,
    KVR__KIND_SET_POLICY = 31,
    KVR__KIND_SET_POLICY_REPLY = 32,
    KVR__KIND_OPEN_LANE = 33,
    KVR__KIND_OPEN_LANE_REPLY = 34,
    KVR__KIND_ERROR = 254
};
/* enum Window */
enum {
    KVR__WINDOW_PLAIN = 0,
    KVR__WINDOW_BIGRAM = 1
};
/* enum SeedRule */
enum {
    KVR__SEED_RULE_XXH3_ADDITIVE = 0
};
/* enum PoolRole */
enum {
    KVR__POOL_ROLE_BOTH = 0,
    KVR__POOL_ROLE_PREFILL = 1,
    KVR__POOL_ROLE_DECODE = 2
};
/* enum WorkerState */
enum {
    KVR__WORKER_STATE_JOINING = 0,
    KVR__WORKER_STATE_READY = 1,
    KVR__WORKER_STATE_DRAINING = 2,
    KVR__WORKER_STATE_DOWN = 3
};
/* enum DeviceClass */
enum {
    KVR__DEVICE_CLASS_GPU = 0,
    KVR__DEVICE_CLASS_CPU = 1
};
/* enum TrustLevel */
enum {
    KVR__TRUST_LEVEL_NONE = 0,
    KVR__TRUST_LEVEL_PREDICTED = 1,
    KVR__TRUST_LEVEL_UNPROVEN = 2,
    KVR__TRUST_LEVEL_LOWER_BOUND = 3,
    KVR__TRUST_LEVEL_EXACT = 4
};
/* enum MatchStatus */
enum {
    KVR__MATCH_STATUS_MATCHED = 0,
    KVR__MATCH_STATUS_UNMATCHABLE = 1
};
/* enum Mode */
enum {
    KVR__MODE_DEFAULT = 0,
    KVR__MODE_KV = 1,
    KVR__MODE_LOAD_AWARE = 2,
    KVR__MODE_APPROXIMATE = 3,
    KVR__MODE_LEAST_LOADED = 4,
    KVR__MODE_POWER_OF_TWO = 5,
    KVR__MODE_ROUND_ROBIN = 6,
    KVR__MODE_RANDOM = 7,
    KVR__MODE_DIRECT = 8,
    KVR__MODE_DEVICE_AWARE_WEIGHTED = 9,
    KVR__MODE_LMETRIC = 10,
    KVR__MODE_LATENCY = 11
};
/* table Scheme */
enum {
    KVR__SCHEME_BLOCK_SIZE = 0,
    KVR__SCHEME_WINDOW = 1,
    KVR__SCHEME_SEED_RULE = 2,
    KVR__SCHEME_FIELD_COUNT = 3
};
/* struct WorkerRef */
enum {
    KVR__WORKER_REF_WORKER_ID_AT = 0,
    KVR__WORKER_REF_DP_RANK_AT = 8,
    KVR__WORKER_REF_BYTES = 16
};
/* struct SessionToken */
enum {
    KVR__SESSION_TOKEN_HI_AT = 0,
    KVR__SESSION_TOKEN_LO_AT = 8,
    KVR__SESSION_TOKEN_BYTES = 16
};
/* struct BookingHandle */
enum {
    KVR__BOOKING_HANDLE_SLOT_AT = 0,
    KVR__BOOKING_HANDLE_GENERATION_AT = 8,
    KVR__BOOKING_HANDLE_BYTES = 16
};
/* struct MediaHash */
enum {
    KVR__MEDIA_HASH_BLOCK_AT = 0,
    KVR__MEDIA_HASH_HASH_AT = 8,
    KVR__MEDIA_HASH_BYTES = 16
};
/* struct BlockRange */
enum {
    KVR__BLOCK_RANGE_START_AT = 0,
    KVR__BLOCK_RANGE_END_AT = 4,
    KVR__BLOCK_RANGE_BYTES = 8
};
/* struct TierBlocks */
enum {
    KVR__TIER_BLOCKS_DEVICE_AT = 0,
    KVR__TIER_BLOCKS_HOST_AT = 4,
    KVR__TIER_BLOCKS_DISK_AT = 8,
    KVR__TIER_BLOCKS_EXTERNAL_AT = 12,
    KVR__TIER_BLOCKS_BYTES = 16
};
/* struct Trust */
enum {
    KVR__TRUST_LEVEL_AT = 0,
    KVR__TRUST_REASONS_AT = 8,
    KVR__TRUST_SINCE_UNIX_MS_AT = 16,
    KVR__TRUST_AS_OF_SEQ_AT = 24,
    KVR__TRUST_AS_OF_UNIX_MS_AT = 32,
    KVR__TRUST_BYTES = 40
};
/* table Taint */
enum {
    KVR__TAINT_KEY = 0,
    KVR__TAINT_WEIGHT = 1,
    KVR__TAINT_FIELD_COUNT = 2
};
/* table Hello */
enum {
    KVR__HELLO_VERSION_MIN = 0,
    KVR__HELLO_VERSION_MAX = 1,
    KVR__HELLO_CLIENT_NAME = 2,
    KVR__HELLO_SESSION = 3,
    KVR__HELLO_FIELD_COUNT = 4
};
/* table Limits */
enum {
    KVR__LIMITS_FRAME_BODY_BYTES_MAX = 0,
    KVR__LIMITS_PROMPT_TOKENS_MAX = 1,
    KVR__LIMITS_CANDIDATES_MAX = 2,
    KVR__LIMITS_WORKERS_PAGE_MAX = 3,
    KVR__LIMITS_BOOKINGS_PER_SESSION_MAX = 4,
    KVR__LIMITS_FIELD_COUNT = 5
};
/* table Space */
enum {
    KVR__SPACE_SPACE_ID = 0,
    KVR__SPACE_MODEL = 1,
    KVR__SPACE_NAMESPACE = 2,
    KVR__SPACE_ROLE = 3,
    KVR__SPACE_SCHEME = 4,
    KVR__SPACE_FIELD_COUNT = 5
};
/* table HelloReply */
enum {
    KVR__HELLO_REPLY_VERSION = 0,
    KVR__HELLO_REPLY_INSTANCE_ID = 1,
    KVR__HELLO_REPLY_LIMITS = 2,
    KVR__HELLO_REPLY_FEATURES = 3,
    KVR__HELLO_REPLY_SPACES = 4,
    KVR__HELLO_REPLY_ADMIN_SOCKET = 5,
    KVR__HELLO_REPLY_FIELD_COUNT = 6
};
/* table Overrides */
enum {
    KVR__OVERRIDES_MODE = 0,
    KVR__OVERRIDES_DEVICE_CREDIT = 1,
    KVR__OVERRIDES_PREFILL_LOAD_SCALE = 2,
    KVR__OVERRIDES_TEMPERATURE = 3,
    KVR__OVERRIDES_SHARED_MULTIPLIER = 4,
    KVR__OVERRIDES_ASSUME_KV_REUSE = 5,
    KVR__OVERRIDES_TRACK_PREFILL_TOKENS = 6,
    KVR__OVERRIDES_FIELD_COUNT = 7
};
/* table Route */
enum {
    KVR__ROUTE_SPACE_ID = 0,
    KVR__ROUTE_MUST_UNDERSTAND = 1,
    KVR__ROUTE_REQUEST_ID = 2,
    KVR__ROUTE_ATTEMPT = 3,
    KVR__ROUTE_TOKENS = 4,
    KVR__ROUTE_LOCAL_HASHES = 5,
    KVR__ROUTE_SCHEME = 6,
    KVR__ROUTE_TOKEN_COUNT = 7,
    KVR__ROUTE_LORA = 8,
    KVR__ROUTE_SALT = 9,
    KVR__ROUTE_MEDIA = 10,
    KVR__ROUTE_BOOK = 11,
    KVR__ROUTE_EXPLAIN = 12,
    KVR__ROUTE_CANDIDATES_MAX = 13,
    KVR__ROUTE_ALLOW = 14,
    KVR__ROUTE_PIN = 15,
    KVR__ROUTE_REQUIRED_TAINTS = 16,
    KVR__ROUTE_PREFERRED_TAINTS = 17,
    KVR__ROUTE_EXPECTED_OUTPUT_TOKENS = 18,
    KVR__ROUTE_OVERRIDES = 19,
    KVR__ROUTE_SHARED_HITS = 20,
    KVR__ROUTE_AFFINITY_SESSION = 21,
    KVR__ROUTE_PRIORITY = 22,
    KVR__ROUTE_PRIORITY_JUMP = 23,
    KVR__ROUTE_DEADLINE_US = 24,
    KVR__ROUTE_DISAGGREGATE = 25,
    KVR__ROUTE_FIELD_COUNT = 26
};
/* table CostTerms */
enum {
    KVR__COST_TERMS_REQUEST_BLOCKS = 0,
    KVR__COST_TERMS_CACHED_TOKENS = 1,
    KVR__COST_TERMS_EFFECTIVE_OVERLAP = 2,
    KVR__COST_TERMS_ACTIVE_PREFILL_TOKENS = 3,
    KVR__COST_TERMS_DECAY = 4,
    KVR__COST_TERMS_DEVICE_CREDIT = 5,
    KVR__COST_TERMS_HOST_CREDIT = 6,
    KVR__COST_TERMS_DISK_CREDIT = 7,
    KVR__COST_TERMS_SHARED_CREDIT = 8,
    KVR__COST_TERMS_PREFILL = 9,
    KVR__COST_TERMS_ACTIVE_DECODE_BLOCKS = 10,
    KVR__COST_TERMS_ADDITIONAL_DECODE_BLOCKS = 11,
    KVR__COST_TERMS_DECODE = 12,
    KVR__COST_TERMS_ACTIVE_REQUESTS = 13,
    KVR__COST_TERMS_ACTIVE_REQUESTS_COST = 14,
    KVR__COST_TERMS_CAPABILITY_WEIGHT = 15,
    KVR__COST_TERMS_TAINT_FACTOR = 16,
    KVR__COST_TERMS_COST = 17,
    KVR__COST_TERMS_AFFINITY_FACTOR = 18,
    KVR__COST_TERMS_IN_FLIGHT_BLOCKS = 19,
    KVR__COST_TERMS_QUEUE_S = 20,
    KVR__COST_TERMS_PREFILL_S = 21,
    KVR__COST_TERMS_FETCH_S = 22,
    KVR__COST_TERMS_DELAY_S = 23,
    KVR__COST_TERMS_LATER_DELAY_S = 24,
    KVR__COST_TERMS_OUTPUT_DELAY_S = 25,
    KVR__COST_TERMS_FIELD_COUNT = 26
};
/* table Candidate */
enum {
    KVR__CANDIDATE_WORKER_ID = 0,
    KVR__CANDIDATE_DP_RANK = 1,
    KVR__CANDIDATE_NAME = 2,
    KVR__CANDIDATE_OVERLAP = 3,
    KVR__CANDIDATE_TRUST = 4,
    KVR__CANDIDATE_COST = 5,
    KVR__CANDIDATE_STATE = 6,
    KVR__CANDIDATE_TERMS = 7,
    KVR__CANDIDATE_FIELD_COUNT = 8
};
/* table Removal */
enum {
    KVR__REMOVAL_RULE = 0,
    KVR__REMOVAL_WORKERS = 1,
    KVR__REMOVAL_FIELD_COUNT = 2
};
/* table RouteReply */
enum {
    KVR__ROUTE_REPLY_CANDIDATES = 0,
    KVR__ROUTE_REPLY_ELIGIBLE = 1,
    KVR__ROUTE_REPLY_MATCH = 2,
    KVR__ROUTE_REPLY_NOTES = 3,
    KVR__ROUTE_REPLY_REQUEST_BLOCKS = 4,
    KVR__ROUTE_REPLY_POLICY_VERSION = 5,
    KVR__ROUTE_REPLY_FLEET_VERSION = 6,
    KVR__ROUTE_REPLY_INDEX_EPOCH = 7,
    KVR__ROUTE_REPLY_BOOKING = 8,
    KVR__ROUTE_REPLY_REMOVED = 9,
    KVR__ROUTE_REPLY_TIES = 10,
    KVR__ROUTE_REPLY_NOBODY = 11,
    KVR__ROUTE_REPLY_RETRY_AFTER_US = 12,
    KVR__ROUTE_REPLY_MODE = 13,
    KVR__ROUTE_REPLY_PREFILL = 14,
    KVR__ROUTE_REPLY_PREFILL_BOOKING = 15,
    KVR__ROUTE_REPLY_FIELD_COUNT = 16
};
/* table PrefillComplete */
enum {
    KVR__PREFILL_COMPLETE_BOOKING = 0,
    KVR__PREFILL_COMPLETE_REQUEST_ID = 1,
    KVR__PREFILL_COMPLETE_ATTEMPT = 2,
    KVR__PREFILL_COMPLETE_PREFILL_US = 3,
    KVR__PREFILL_COMPLETE_MUST_UNDERSTAND = 4,
    KVR__PREFILL_COMPLETE_FIELD_COUNT = 5
};
/* table Free */
enum {
    KVR__FREE_BOOKING = 0,
    KVR__FREE_REQUEST_ID = 1,
    KVR__FREE_ATTEMPT = 2,
    KVR__FREE_MUST_UNDERSTAND = 3,
    KVR__FREE_FIELD_COUNT = 4
};
/* table OutputProgress */
enum {
    KVR__OUTPUT_PROGRESS_BOOKING = 0,
    KVR__OUTPUT_PROGRESS_REQUEST_ID = 1,
    KVR__OUTPUT_PROGRESS_ATTEMPT = 2,
    KVR__OUTPUT_PROGRESS_OUTPUT_TOKENS = 3,
    KVR__OUTPUT_PROGRESS_MUST_UNDERSTAND = 4,
    KVR__OUTPUT_PROGRESS_FIELD_COUNT = 5
};
/* table Served */
enum {
    KVR__SERVED_BOOKING = 0,
    KVR__SERVED_REQUEST_ID = 1,
    KVR__SERVED_ATTEMPT = 2,
    KVR__SERVED_WORKER = 3,
    KVR__SERVED_MUST_UNDERSTAND = 4,
    KVR__SERVED_FIELD_COUNT = 5
};
/* enum BookingOutcome */
enum {
    KVR__BOOKING_OUTCOME_APPLIED = 0,
    KVR__BOOKING_OUTCOME_ALREADY_APPLIED = 1,
    KVR__BOOKING_OUTCOME_UNKNOWN = 2,
    KVR__BOOKING_OUTCOME_SUPERSEDED = 3
};
/* table PrefillCompleteReply */
enum {
    KVR__PREFILL_COMPLETE_REPLY_OUTCOME = 0,
    KVR__PREFILL_COMPLETE_REPLY_INSTANCE_ID = 1,
    KVR__PREFILL_COMPLETE_REPLY_FIELD_COUNT = 2
};
/* table FreeReply */
enum {
    KVR__FREE_REPLY_OUTCOME = 0,
    KVR__FREE_REPLY_INSTANCE_ID = 1,
    KVR__FREE_REPLY_FIELD_COUNT = 2
};
/* table OutputProgressReply */
enum {
    KVR__OUTPUT_PROGRESS_REPLY_OUTCOME = 0,
    KVR__OUTPUT_PROGRESS_REPLY_INSTANCE_ID = 1,
    KVR__OUTPUT_PROGRESS_REPLY_FIELD_COUNT = 2
};
/* table ServedReply */
enum {
    KVR__SERVED_REPLY_OUTCOME = 0,
    KVR__SERVED_REPLY_INSTANCE_ID = 1,
    KVR__SERVED_REPLY_FIELD_COUNT = 2
};
/* table ReportFailure */
enum {
    KVR__REPORT_FAILURE_WORKER = 0,
    KVR__REPORT_FAILURE_SPACE_ID = 1,
    KVR__REPORT_FAILURE_REASON = 2,
    KVR__REPORT_FAILURE_MUST_UNDERSTAND = 3,
    KVR__REPORT_FAILURE_FIELD_COUNT = 4
};
/* table ReportFailureReply */
enum {
    KVR__REPORT_FAILURE_REPLY_BACK_OFF_MS = 0,
    KVR__REPORT_FAILURE_REPLY_FIELD_COUNT = 1
};
/* table ReportLoad */
enum {
    KVR__REPORT_LOAD_WORKER = 0,
    KVR__REPORT_LOAD_SPACE_ID = 1,
    KVR__REPORT_LOAD_ACTIVE_PREFILL_TOKENS = 2,
    KVR__REPORT_LOAD_ACTIVE_DECODE_BLOCKS = 3,
    KVR__REPORT_LOAD_RUNNING_REQUESTS = 4,
    KVR__REPORT_LOAD_WAITING_REQUESTS = 5,
    KVR__REPORT_LOAD_KV_USAGE = 6,
    KVR__REPORT_LOAD_MUST_UNDERSTAND = 7,
    KVR__REPORT_LOAD_FIELD_COUNT = 8
};
/* table ReportLoadReply */
enum {
    KVR__REPORT_LOAD_REPLY_ACCEPTED = 0,
    KVR__REPORT_LOAD_REPLY_FIELD_COUNT = 1
};
/* table PotentialLoads */
enum {
    KVR__POTENTIAL_LOADS_SPACE_ID = 0,
    KVR__POTENTIAL_LOADS_TOKENS = 1,
    KVR__POTENTIAL_LOADS_LOCAL_HASHES = 2,
    KVR__POTENTIAL_LOADS_SCHEME = 3,
    KVR__POTENTIAL_LOADS_TOKEN_COUNT = 4,
    KVR__POTENTIAL_LOADS_LORA = 5,
    KVR__POTENTIAL_LOADS_SALT = 6,
    KVR__POTENTIAL_LOADS_MEDIA = 7,
    KVR__POTENTIAL_LOADS_MUST_UNDERSTAND = 8,
    KVR__POTENTIAL_LOADS_FIELD_COUNT = 9
};
/* table PotentialLoad */
enum {
    KVR__POTENTIAL_LOAD_WORKER_ID = 0,
    KVR__POTENTIAL_LOAD_DP_RANK = 1,
    KVR__POTENTIAL_LOAD_ACTIVE_REQUESTS = 2,
    KVR__POTENTIAL_LOAD_PREFILL_TOKENS = 3,
    KVR__POTENTIAL_LOAD_DECODE_BLOCKS = 4,
    KVR__POTENTIAL_LOAD_FIELD_COUNT = 5
};
/* table PotentialLoadsReply */
enum {
    KVR__POTENTIAL_LOADS_REPLY_LOADS = 0,
    KVR__POTENTIAL_LOADS_REPLY_MATCH = 1,
    KVR__POTENTIAL_LOADS_REPLY_REQUEST_BLOCKS = 2,
    KVR__POTENTIAL_LOADS_REPLY_NOTES = 3,
    KVR__POTENTIAL_LOADS_REPLY_FIELD_COUNT = 4
};
/* table Overlap */
enum {
    KVR__OVERLAP_SPACE_ID = 0,
    KVR__OVERLAP_TOKENS = 1,
    KVR__OVERLAP_LOCAL_HASHES = 2,
    KVR__OVERLAP_SCHEME = 3,
    KVR__OVERLAP_TOKEN_COUNT = 4,
    KVR__OVERLAP_LORA = 5,
    KVR__OVERLAP_SALT = 6,
    KVR__OVERLAP_MEDIA = 7,
    KVR__OVERLAP_MUST_UNDERSTAND = 8,
    KVR__OVERLAP_FIELD_COUNT = 9
};
/* table OverlapEntry */
enum {
    KVR__OVERLAP_ENTRY_WORKER_ID = 0,
    KVR__OVERLAP_ENTRY_DP_RANK = 1,
    KVR__OVERLAP_ENTRY_OVERLAP = 2,
    KVR__OVERLAP_ENTRY_TRUST = 3,
    KVR__OVERLAP_ENTRY_FIELD_COUNT = 4
};
/* table OverlapReply */
enum {
    KVR__OVERLAP_REPLY_WORKERS = 0,
    KVR__OVERLAP_REPLY_MATCH = 1,
    KVR__OVERLAP_REPLY_REQUEST_BLOCKS = 2,
    KVR__OVERLAP_REPLY_NOTES = 3,
    KVR__OVERLAP_REPLY_FIELD_COUNT = 4
};
/* table WorkerInfo */
enum {
    KVR__WORKER_INFO_WORKER_ID = 0,
    KVR__WORKER_INFO_DP_RANK = 1,
    KVR__WORKER_INFO_SPACE_ID = 2,
    KVR__WORKER_INFO_NAME = 3,
    KVR__WORKER_INFO_STATE = 4,
    KVR__WORKER_INFO_DEVICE_CLASS = 5,
    KVR__WORKER_INFO_WEIGHT = 6,
    KVR__WORKER_INFO_CAPACITY_BLOCKS = 7,
    KVR__WORKER_INFO_BATCHED_TOKENS_MAX = 8,
    KVR__WORKER_INFO_TAINTS = 9,
    KVR__WORKER_INFO_TRUST = 10,
    KVR__WORKER_INFO_FIELD_COUNT = 11
};
/* table Workers */
enum {
    KVR__WORKERS_SPACE_ID = 0,
    KVR__WORKERS_CURSOR = 1,
    KVR__WORKERS_LIMIT = 2,
    KVR__WORKERS_MUST_UNDERSTAND = 3,
    KVR__WORKERS_FIELD_COUNT = 4
};
/* table WorkersReply */
enum {
    KVR__WORKERS_REPLY_WORKERS = 0,
    KVR__WORKERS_REPLY_NEXT_CURSOR = 1,
    KVR__WORKERS_REPLY_FLEET_VERSION = 2,
    KVR__WORKERS_REPLY_FIELD_COUNT = 3
};
/* table Watch */
enum {
    KVR__WATCH_SPACE_ID = 0,
    KVR__WATCH_FLEET_VERSION_SEEN = 1,
    KVR__WATCH_MUST_UNDERSTAND = 2,
    KVR__WATCH_PAGE_LIMIT = 3,
    KVR__WATCH_FIELD_COUNT = 4
};
/* table WatchReply */
enum {
    KVR__WATCH_REPLY_WORKERS = 0,
    KVR__WATCH_REPLY_FLEET_VERSION = 1,
    KVR__WATCH_REPLY_NEXT_CURSOR = 2,
    KVR__WATCH_REPLY_FIELD_COUNT = 3
};
/* table OpenLane */
enum {
    KVR__OPEN_LANE_REQUEST_RING_BYTES = 0,
    KVR__OPEN_LANE_REPLY_RING_BYTES = 1,
    KVR__OPEN_LANE_MUST_UNDERSTAND = 2,
    KVR__OPEN_LANE_FIELD_COUNT = 3
};
/* table OpenLaneReply */
enum {
    KVR__OPEN_LANE_REPLY_LAYOUT = 0,
    KVR__OPEN_LANE_REPLY_REQUEST_RING_BYTES = 1,
    KVR__OPEN_LANE_REPLY_REPLY_RING_BYTES = 2,
    KVR__OPEN_LANE_REPLY_FIELD_COUNT = 3
};
/* table Counter */
enum {
    KVR__COUNTER_NAME = 0,
    KVR__COUNTER_VALUE = 1,
    KVR__COUNTER_FIELD_COUNT = 2
};
/* table WorkerStatus */
enum {
    KVR__WORKER_STATUS_WORKER_ID = 0,
    KVR__WORKER_STATUS_DP_RANK = 1,
    KVR__WORKER_STATUS_SPACE_ID = 2,
    KVR__WORKER_STATUS_MODEL = 3,
    KVR__WORKER_STATUS_NAME = 4,
    KVR__WORKER_STATUS_STATE = 5,
    KVR__WORKER_STATUS_TRUST = 6,
    KVR__WORKER_STATUS_BLOCKS_HELD = 7,
    KVR__WORKER_STATUS_BLOCKS_BY_TIER = 8,
    KVR__WORKER_STATUS_COUNTERS = 9,
    KVR__WORKER_STATUS_REMEDY = 10,
    KVR__WORKER_STATUS_SOURCE = 11,
    KVR__WORKER_STATUS_FIELD_COUNT = 12
};
/* table SourceStatus */
enum {
    KVR__SOURCE_STATUS_NAME = 0,
    KVR__SOURCE_STATUS_WORKERS = 1,
    KVR__SOURCE_STATUS_PROBLEM = 2,
    KVR__SOURCE_STATUS_FIELD_COUNT = 3
};
/* table RouterStatus */
enum {
    KVR__ROUTER_STATUS_ADDRESS = 0,
    KVR__ROUTER_STATUS_STATE = 1,
    KVR__ROUTER_STATUS_ORIGIN = 2,
    KVR__ROUTER_STATUS_INCARNATION = 3,
    KVR__ROUTER_STATUS_SEQUENCE = 4,
    KVR__ROUTER_STATUS_DIGEST = 5,
    KVR__ROUTER_STATUS_WORKERS = 6,
    KVR__ROUTER_STATUS_REQUESTS = 7,
    KVR__ROUTER_STATUS_PREFILL_TOKENS = 8,
    KVR__ROUTER_STATUS_DECODE_BLOCKS = 9,
    KVR__ROUTER_STATUS_AGE_MS = 10,
    KVR__ROUTER_STATUS_PROBLEM = 11,
    KVR__ROUTER_STATUS_COUNTERS = 12,
    KVR__ROUTER_STATUS_FIELD_COUNT = 13
};
/* table Status */
enum {
    KVR__STATUS_CURSOR = 0,
    KVR__STATUS_LIMIT = 1,
    KVR__STATUS_MUST_UNDERSTAND = 2,
    KVR__STATUS_FIELD_COUNT = 3
};
/* enum Harm */
enum {
    KVR__HARM_NOTE = 0,
    KVR__HARM_WARNING = 1,
    KVR__HARM_SEVERE = 2
};
/* table Finding */
enum {
    KVR__FINDING_NAME = 0,
    KVR__FINDING_HARM = 1,
    KVR__FINDING_SINCE_UNIX_MS = 2,
    KVR__FINDING_WORKERS = 3,
    KVR__FINDING_WORKERS_TOTAL = 4,
    KVR__FINDING_WHAT = 5,
    KVR__FINDING_WHY = 6,
    KVR__FINDING_REMEDY = 7,
    KVR__FINDING_FIELD_COUNT = 8
};
/* table StatusReply */
enum {
    KVR__STATUS_REPLY_WORKERS = 0,
    KVR__STATUS_REPLY_NEXT_CURSOR = 1,
    KVR__STATUS_REPLY_FLEET_VERSION = 2,
    KVR__STATUS_REPLY_INSTANCE_ID = 3,
    KVR__STATUS_REPLY_UPTIME_MS = 4,
    KVR__STATUS_REPLY_COUNTERS = 5,
    KVR__STATUS_REPLY_SOURCES = 6,
    KVR__STATUS_REPLY_FINDINGS = 7,
    KVR__STATUS_REPLY_DAEMON_VERSION = 8,
    KVR__STATUS_REPLY_METRICS_PORT = 9,
    KVR__STATUS_REPLY_ROUTERS = 10,
    KVR__STATUS_REPLY_FIELD_COUNT = 11
};
/* enum WorkerOp */
enum {
    KVR__WORKER_OP_ADD = 0,
    KVR__WORKER_OP_REMOVE = 1,
    KVR__WORKER_OP_SET = 2
};
/* table WorkerField */
enum {
    KVR__WORKER_FIELD_NAME = 0,
    KVR__WORKER_FIELD_VALUE = 1,
    KVR__WORKER_FIELD_FIELD_COUNT = 2
};
/* table ChangeWorker */
enum {
    KVR__CHANGE_WORKER_OP = 0,
    KVR__CHANGE_WORKER_WORKER = 1,
    KVR__CHANGE_WORKER_FIELDS = 2,
    KVR__CHANGE_WORKER_MUST_UNDERSTAND = 3,
    KVR__CHANGE_WORKER_FIELD_COUNT = 4
};
/* table ChangeWorkerReply */
enum {
    KVR__CHANGE_WORKER_REPLY_WORKERS = 0,
    KVR__CHANGE_WORKER_REPLY_FIELD_COUNT = 1
};
/* table Reset */
enum {
    KVR__RESET_WORKER = 0,
    KVR__RESET_MUST_UNDERSTAND = 1,
    KVR__RESET_ENGINE_CLEARED = 2,
    KVR__RESET_FIELD_COUNT = 3
};
/* table ResetReply */
enum {
    KVR__RESET_REPLY_WORKERS = 0,
    KVR__RESET_REPLY_SNAPSHOTS = 1,
    KVR__RESET_REPLY_FIELD_COUNT = 2
};
/* enum PolicyOp */
enum {
    KVR__POLICY_OP_SHADOW = 0,
    KVR__POLICY_OP_PROMOTE = 1,
    KVR__POLICY_OP_END_SHADOW = 2
};
/* table PolicyField */
enum {
    KVR__POLICY_FIELD_NAME = 0,
    KVR__POLICY_FIELD_VALUE = 1,
    KVR__POLICY_FIELD_FIELD_COUNT = 2
};
/* table SetPolicy */
enum {
    KVR__SET_POLICY_OP = 0,
    KVR__SET_POLICY_SETTINGS = 1,
    KVR__SET_POLICY_SHARE = 2,
    KVR__SET_POLICY_MUST_UNDERSTAND = 3,
    KVR__SET_POLICY_FIELD_COUNT = 4
};
/* table SetPolicyReply */
enum {
    KVR__SET_POLICY_REPLY_POLICY_VERSION = 0,
    KVR__SET_POLICY_REPLY_SHADOW_SHARE = 1,
    KVR__SET_POLICY_REPLY_FIELD_COUNT = 2
};
/* enum ErrorSide */
enum {
    KVR__ERROR_SIDE_GATEWAY = 0,
    KVR__ERROR_SIDE_WORKER = 1,
    KVR__ERROR_SIDE_KERNEL = 2,
    KVR__ERROR_SIDE_CONFIG = 3,
    KVR__ERROR_SIDE_DAEMON = 4
};
/* table Error */
enum {
    KVR__ERROR_CODE = 0,
    KVR__ERROR_SIDE = 1,
    KVR__ERROR_RETRYABLE = 2,
    KVR__ERROR_RETRY_AFTER_US = 3,
    KVR__ERROR_MESSAGE = 4,
    KVR__ERROR_REMEDY = 5,
    KVR__ERROR_FIELD_COUNT = 6
};

/* The terms of a cost, in the order of the computation. Blocks, unless noted. */
typedef struct kvr_terms {
    double request_blocks;
    double cached_tokens; /* tokens */
    double effective_overlap;
    double active_prefill_tokens; /* tokens */
    double decay; /* factor in (0, 1] */
    double device_credit;
    double host_credit;
    double disk_credit;
    double shared_credit;
    double prefill;
    double active_decode_blocks;
    double additional_decode_blocks;
    double decode;
    double active_requests; /* requests */
    double active_requests_cost;
    double capability_weight; /* factor */
    double taint_factor; /* factor */
    double cost;
    double affinity_factor; /* factor: below 1 if the request's session is bound to the worker */
    double in_flight_blocks; /* blocks of the prompt that the worker does not hold yet, but computes for other requests */
    double queue_s; /* seconds: predicted rest of the prefills booked before this one */
    double prefill_s; /* seconds: predicted prefill of this prompt */
    double fetch_s; /* seconds: predicted fetch of blocks from below the device's memory */
    double delay_s; /* seconds: weighted delay of the worker's other requests by this prefill */
    double later_delay_s; /* seconds: weighted delay of requests that come later by this prefill */
    double output_delay_s; /* seconds: weighted delay of this request's output by other prefills on the worker */
} kvr_terms;
/* F(field, its number, its value if it is absent) for each field of CostTerms. */
#define KVR__EACH_OF_COST_TERMS(F) \
    F(request_blocks, KVR__COST_TERMS_REQUEST_BLOCKS, 0) \
    F(cached_tokens, KVR__COST_TERMS_CACHED_TOKENS, 0) \
    F(effective_overlap, KVR__COST_TERMS_EFFECTIVE_OVERLAP, 0) \
    F(active_prefill_tokens, KVR__COST_TERMS_ACTIVE_PREFILL_TOKENS, 0) \
    F(decay, KVR__COST_TERMS_DECAY, 0) \
    F(device_credit, KVR__COST_TERMS_DEVICE_CREDIT, 0) \
    F(host_credit, KVR__COST_TERMS_HOST_CREDIT, 0) \
    F(disk_credit, KVR__COST_TERMS_DISK_CREDIT, 0) \
    F(shared_credit, KVR__COST_TERMS_SHARED_CREDIT, 0) \
    F(prefill, KVR__COST_TERMS_PREFILL, 0) \
    F(active_decode_blocks, KVR__COST_TERMS_ACTIVE_DECODE_BLOCKS, 0) \
    F(additional_decode_blocks, KVR__COST_TERMS_ADDITIONAL_DECODE_BLOCKS, 0) \
    F(decode, KVR__COST_TERMS_DECODE, 0) \
    F(active_requests, KVR__COST_TERMS_ACTIVE_REQUESTS, 0) \
    F(active_requests_cost, KVR__COST_TERMS_ACTIVE_REQUESTS_COST, 0) \
    F(capability_weight, KVR__COST_TERMS_CAPABILITY_WEIGHT, 0) \
    F(taint_factor, KVR__COST_TERMS_TAINT_FACTOR, 0) \
    F(cost, KVR__COST_TERMS_COST, 0) \
    F(affinity_factor, KVR__COST_TERMS_AFFINITY_FACTOR, 1) \
    F(in_flight_blocks, KVR__COST_TERMS_IN_FLIGHT_BLOCKS, 0) \
    F(queue_s, KVR__COST_TERMS_QUEUE_S, 0) \
    F(prefill_s, KVR__COST_TERMS_PREFILL_S, 0) \
    F(fetch_s, KVR__COST_TERMS_FETCH_S, 0) \
    F(delay_s, KVR__COST_TERMS_DELAY_S, 0) \
    F(later_delay_s, KVR__COST_TERMS_LATER_DELAY_S, 0) \
    F(output_delay_s, KVR__COST_TERMS_OUTPUT_DELAY_S, 0)

#endif
