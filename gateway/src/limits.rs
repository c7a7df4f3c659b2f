//! Every bound of the gateway, with its unit in the name and its reason.

use std::time::Duration;

// ---- api: bodies and replies --------------------------------------------------------------------------------------

/// Bytes of the JSON object with a reply's usage. vLLM's has about 300; more is no usage object.
pub(crate) const USAGE_BYTES_MAX: usize = 16 << 10;
/// Bytes of an event that the filter of server-sent events holds back while it looks for the extra usage chunk. That
/// chunk has about 400 bytes; a longer event is passed on as it comes.
pub(crate) const FILTER_EVENT_BYTES_MAX: usize = 16 << 10;
/// Bytes at the start of each line of a stream that the usage reader looks at to tell output from other events.
pub(crate) const EVENT_LINE_BYTES_MAX: usize = 512;
/// Bytes of `model`, `cache_salt` and `lora_path` in a body. They are copied, and become names on the daemon's wire.
pub(crate) const BODY_NAME_BYTES_MAX: usize = 1024;

// ---- proxy: callers -----------------------------------------------------------------------------------------------

/// Bytes of a request id that a caller may choose. Longer ones, and those with other characters than visible ASCII, are
/// replaced: the id goes into logs and to the daemon.
pub(crate) const REQUEST_ID_BYTES_MAX: usize = 128;
/// Bytes of a session or a tenant that a header names.
pub(crate) const HEADER_NAME_BYTES_MAX: usize = 256;
/// Caller keys in the file: each request is compared with every key, in constant time.
pub(crate) const CALLER_KEYS_MAX: usize = 4096;
/// Bytes of the file of caller keys.
pub(crate) const CALLER_KEYS_BYTES_MAX: u64 = 4 << 20;
/// Parts of a reply that wait for a slow caller. One part is one read from the engine, so that a slow caller slows its
/// engine's connection down, and little memory is held.
pub(crate) const RELAY_PARTS_MAX: usize = 2;
/// HTTP/2 streams that a caller's connection may have open.
pub(crate) const H2_STREAMS_MAX: u32 = 256;
/// Rest after a connection could not be accepted, for want of file descriptors or memory.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How many times a request asks the router: once, and once more without the engines that failed.
pub(crate) const ROUTING_ROUNDS_MAX: usize = 2;

/// Bytes of the reply of an engine that only prefills. It names each block of the prompt, of which a million tokens have
/// about half a MiB, and has one token of output; the rest is room for the log-probabilities of the prompt.
pub(crate) const PREFILL_REPLY_BYTES_MAX: usize = 64 << 20;
/// How long the reply of an engine that prefills may go on after the other engine's first byte, which comes after the
/// prompt's last block was sent.
pub(crate) const PREFILL_END_MAX: Duration = Duration::from_secs(10);

// ---- the process ----------------------------------------------------------------------------------------------------

/// The share of the memory of a machine, or of a container's cgroup, that the gateway plans with unless configured,
/// percent. In a container it is alone, or with the daemon that it runs; a machine has other programs.
pub(crate) const fn gateway_share_percent(has_daemon: bool, in_cgroup: bool) -> u64 {
    match (has_daemon, in_cgroup) {
        (true, _) => 20,
        (false, true) => DAEMON_AND_GATEWAY_SHARE_PERCENT,
        (false, false) => 25,
    }
}
/// The share for the gateway and the daemon that it runs together, percent. The rest is for the kernel and the allocator.
pub(crate) const DAEMON_AND_GATEWAY_SHARE_PERCENT: u64 = 75;
/// The least budget that the gateway gives to the daemon that it runs, bytes: enough for the fixed parts of a daemon
/// with the defaults on any machine.
pub(crate) const DAEMON_BYTES_LEAST: u64 = 512 << 20;
/// Code, threads, engines and their facts, bytes.
pub(crate) const PROCESS_BYTES: u64 = 48 << 20;
/// Pods and services of a usual cluster with their JSON, bytes.
pub(crate) const KUBERNETES_BYTES: u64 = 64 << 20;
/// A usual connection of a caller: headers of some KiB, TLS, and the buffers of HTTP, bytes.
pub(crate) const CONNECTION_USUAL_BYTES: u64 = 32 << 10;
/// Connections for which there must be memory.
pub(crate) const CONNECTIONS_LEAST: u64 = 64;
/// A usual request under way: a connection to an engine, and parts of the reply that wait for the caller, bytes.
pub(crate) const REQUEST_USUAL_BYTES: u64 = 96 << 10;
/// Requests for which there must be memory.
pub(crate) const REQUESTS_LEAST: u64 = 64;
/// A usual stream of Envoy besides its body, bytes.
pub(crate) const STREAM_USUAL_BYTES: u64 = 32 << 10;
/// Streams for which there must be memory.
pub(crate) const STREAMS_LEAST: u64 = 64;
/// A pick of another proxy whose end has not come, bytes.
pub(crate) const PICK_OPEN_BYTES: u64 = 1 << 10;
/// Replies that are read whole, together: least and most, bytes.
pub(crate) const REPLIES_BYTES_LEAST: u64 = 8 << 20;
/// See [`REPLIES_BYTES_LEAST`].
pub(crate) const REPLIES_BYTES_MAX: u64 = 1 << 30;
/// How often the resident memory is looked at.
pub(crate) const MEMORY_LOOK_EVERY: Duration = Duration::from_secs(1);
/// Shares of the budget at which the cache of rendered prompts, and then new requests, are given up, percent.
pub(crate) const MEMORY_SHED_AT_PERCENT: [u64; 2] = [85, 92];
/// Shares below which they are taken up again, percent.
pub(crate) const MEMORY_RESUME_BELOW_PERCENT: [u64; 2] = [80, 87];
/// Looks in a row below that share before it is.
pub(crate) const MEMORY_RESUME_LOOKS: u32 = 3;
/// Open files for the daemon, names, logs, files that are read again, the operator's port and standard streams.
pub(crate) const DESCRIPTORS_RESERVED: u64 = 128;
/// Connections that one request may need at once: to a renderer, or to a prefill and a decode engine.
pub(crate) const DESCRIPTORS_PER_REQUEST: u64 = 2;
/// Open files below which the gateway does not start.
pub(crate) const DESCRIPTORS_LEAST: u64 = 256;

// ---- proxy: the pick port -----------------------------------------------------------------------------------------

/// Requests of other proxies that are under way. Beyond it `/pick` answers 503, so that lost ends cannot fill memory.
pub(crate) const PICKS_OPEN_MAX: usize = 1 << 16;
/// Bytes of an access-log datagram.
pub(crate) const LOG_DATAGRAM_BYTES_MAX: usize = 16 << 10;
/// Bytes of access-log datagrams that wait until they are read, if the kernel allows as many. Each takes about 1 KiB.
pub(crate) const LOG_QUEUE_BYTES: usize = 4 << 20;
/// Datagrams that a Unix log socket should hold (`net.unix.max_dgram_qlen`). With the kernel's default of 10, a third of
/// the lines was lost with 100 callers at once.
pub(crate) const LOG_SOCKET_LINES_MIN: u32 = 256;
/// For how long the end of an unknown pick is remembered. A pick is answered within this time, or its proxy gives up.
pub(crate) const PICK_EARLY_END_MAX: Duration = Duration::from_secs(10);
/// How often picks whose end never came are looked for.
pub(crate) const PICK_SWEEP: Duration = Duration::from_secs(5);
/// Bytes of the body of `/end` and `/prefilled`.
pub(crate) const PICK_END_BYTES_MAX: usize = 16 << 10;

const _: () = assert!(USAGE_BYTES_MAX <= 64 << 10, "the usage scanner's memory is held for every reply under way");
const _: () = assert!(EVENT_LINE_BYTES_MAX < FILTER_EVENT_BYTES_MAX);

// ---- serve --------------------------------------------------------------------------------------------------------

/// Bytes of a file with an API key.
pub(crate) const SECRET_BYTES_MAX: u64 = 64 << 10;
/// How long the start waits for all engines to say what they are. Later they are asked in the background.
pub(crate) const ENGINES_READY_MAX: Duration = Duration::from_secs(10);
/// How long the start waits for the daemon. Later the router decides alone until it answers.
pub(crate) const DAEMON_READY_MAX: Duration = Duration::from_secs(10);
/// How often engines are asked what they are: adapters come and go.
pub(crate) const ENGINES_LEARN_INTERVAL: Duration = Duration::from_secs(15);

// ---- router ---------------------------------------------------------------------------------------------------------

/// How long one question to the daemon may take unless the operator says otherwise. A daemon on the same host answers
/// in less than a millisecond; one that takes longer hangs, and the gateway must go on without it.
pub(crate) const DAEMON_TIMEOUT_DEFAULT: Duration = Duration::from_secs(1);
/// Candidates to ask the daemon for: the best one, and some to retry on.
pub(crate) const CANDIDATES_DEFAULT: usize = 8;
/// The pause between looks at whether the daemon has answered for the first time.
pub(crate) const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of a booking's name before its number. The daemon takes names of 256 bytes.
pub(crate) const BOOKING_NAME_BYTES_MAX: usize = 200;
/// Output tokens after which the daemon is told of a request's progress again: a few blocks, in which it counts.
pub(crate) const OUTPUT_REPORT_TOKENS: u32 = 64;
/// Reports that wait for the reporting task: more than requests are in flight. Further ones are lost and counted, and
/// the daemon ends their bookings by age.
pub(crate) const REPORTS_WAITING_MAX: usize = 1 << 16;
/// Reports that wait for the daemon's answer at once: a quarter of the requests that the client has in flight, so that
/// questions are not held up by reports.
pub(crate) const REPORTS_IN_FLIGHT_MAX: usize = 1024;
/// `Retry-After` where the daemon does not say when to come back.
pub(crate) const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

// ---- router: the daemon as a child ----------------------------------------------------------------------------------

/// The longest path of the child's folder. A Unix socket's path has at most 107 bytes, and the names in the folder need
/// up to 27 of them.
pub(crate) const DAEMON_FOLDER_BYTES_MAX: usize = 80;
/// The pause before the daemon is started again. Each further failure doubles it.
pub(crate) const RESTART_PAUSE_FIRST: Duration = Duration::from_millis(100);
/// The longest pause before the daemon is started again.
pub(crate) const RESTART_PAUSE_MAX: Duration = Duration::from_secs(10);
/// A daemon that ran this long counts as healthy: the next pause is the first one again.
pub(crate) const RUN_HEALTHY_MIN: Duration = Duration::from_secs(60);
/// How many times an engine may name another model or block size within [`SPACE_CHANGES_WINDOW`] before it is left out of
/// the daemon's plan. Each time may start the daemon again.
pub(crate) const SPACE_CHANGES_MAX: usize = 3;
/// See [`SPACE_CHANGES_MAX`].
pub(crate) const SPACE_CHANGES_WINDOW: Duration = Duration::from_secs(3600);
/// How often the daemon's plan is made again although nothing is heard: an engine that was left out may be steady again.
pub(crate) const PLAN_INTERVAL: Duration = Duration::from_secs(60);
/// How long a stopped daemon may drain before it is killed: longer than its own `drain_ms_max`, 5 s, and its last
/// snapshot.
pub(crate) const DAEMON_STOP_MAX: Duration = Duration::from_secs(10);
/// The last lines of the daemon's log that an error shows.
pub(crate) const LOG_LINES_SHOWN: usize = 10;
/// Bytes of a line of the daemon's log. The rest of a longer line is cut off.
pub(crate) const LOG_LINE_BYTES_MAX: usize = 16 << 10;

// ---- demo -----------------------------------------------------------------------------------------------------------

/// The longest prompt and output of a simulated engine together, in tokens: an eighth of its cache, because an engine
/// cannot run what its cache cannot hold.
pub(crate) const DEMO_TOKENS_MAX: usize = 8192;
/// Blocks in a simulated engine's cache.
pub(crate) const DEMO_CAPACITY_BLOCKS: usize = 4096;
/// Bytes of a request's body.
pub(crate) const DEMO_BODY_BYTES_MAX: usize = 1 << 20;
/// How long a simulated engine holds back a prompt that came before the daemon subscribed to it.
pub(crate) const DEMO_READY_WAIT: Duration = Duration::from_secs(10);

const _: () = assert!(DEMO_TOKENS_MAX <= DEMO_CAPACITY_BLOCKS * 16 / 8);
const _: () = assert!(RESTART_PAUSE_FIRST.as_millis() < RESTART_PAUSE_MAX.as_millis());

// ---- epp: the stream with Envoy -----------------------------------------------------------------------------------

/// Bytes of body in one message to Envoy, which advises at most 64 KiB for a whole message.
pub(crate) const EPP_BODY_PIECE_BYTES_MAX: usize = 62_000;
/// Bytes of a message of Envoy beside the body that it carries: headers (Envoy takes 60 KiB of them by default),
/// metadata and attributes.
pub(crate) const EPP_MESSAGE_OVERHEAD_BYTES_MAX: usize = 1 << 20;
/// The largest request body, unless configured. 200,000 tokens of text are about 1 MB; the rest is room for images.
pub(crate) const EPP_BODY_BYTES_MAX: usize = 32 << 20;
/// Bytes of requests that all streams together withhold until their decisions, unless configured.
pub(crate) const EPP_BODIES_BYTES_MAX: usize = 1 << 30;
/// The highest configurable number of those bytes.
pub(crate) const EPP_BODIES_BYTES_CEILING: usize = 64 << 30;
/// Streams at once: one for each request that Envoy has under way, answers included.
pub(crate) const EPP_STREAMS_MAX: usize = 40_000;
/// Bytes of messages that each stream may hold beside that bound, so that answers under way pass while it is reached. Most
/// pieces of a body are shorter.
pub(crate) const EPP_STREAM_BYTES_FREE: usize = 64 << 10;
/// How long a stream may be open before its first message, at least.
pub(crate) const EPP_OPENING_MIN: Duration = Duration::from_secs(1);
/// How long a stream may stay open after its last answer, at least.
pub(crate) const EPP_REST_MIN: Duration = Duration::from_secs(10);
/// How long a caller may take for the next piece of its body, unless configured; also how long a stream may be open before
/// its first message.
pub(crate) const EPP_BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a decision may take, unless configured: a slow renderer (3 s), and time for the daemon.
pub(crate) const EPP_DECISION_TIMEOUT: Duration = Duration::from_secs(5);
/// Endpoints in a list, unless configured: the best one and one for each of two retries.
pub(crate) const EPP_LIST_MAX: usize = 3;
/// Streams that only observe, at once.
pub(crate) const EPP_OBSERVERS_MAX: usize = EPP_STREAMS_MAX;

// ---- epp: connections -----------------------------------------------------------------------------------------------

/// Connections at once. An Envoy has one for each of its worker threads.
pub(crate) const EPP_CONNECTIONS_MAX: usize = 1024;
/// Watches of health at once, on all connections: two of each.
pub(crate) const EPP_HEALTH_WATCHES_MAX: usize = 2 * EPP_CONNECTIONS_MAX;
/// How long a TLS handshake may take.
pub(crate) const EPP_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a silent connection is pinged: the streams of an Envoy that is gone must end, and their bookings with
/// them.
pub(crate) const EPP_PING_INTERVAL: Duration = Duration::from_secs(20);
/// How long the answer to a ping may take.
pub(crate) const EPP_PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Unread bytes of one stream. A stream whose reader is slow is not read either.
pub(crate) const EPP_STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Unread bytes of one connection. So large that streams which are not read never stop the others of their connection.
pub(crate) const EPP_CONNECTION_WINDOW_BYTES: u32 = 1 << 30;
/// Streams that Envoy may reset before they are looked at. Callers who leave all at once must not look like an attack,
/// which would end the connection and every answer on it.
pub(crate) const EPP_EARLY_RESETS_MAX: usize = 1024;
/// How long answers under way may go on after the picker was told to end, unless configured.
pub(crate) const EPP_DRAIN: Duration = Duration::from_secs(60);

// ---- epp: endpoints -------------------------------------------------------------------------------------------------

/// How often the endpoint file and the certificate files are read, and names looked up.
pub(crate) const EPP_REREAD_INTERVAL: Duration = Duration::from_secs(2);
/// How often the picker asks itself whether it is ready.
pub(crate) const EPP_READINESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long the lookup of one name may take.
pub(crate) const EPP_RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the endpoint file: 4,096 engines with 100 bytes each, ten times over.
pub(crate) const EPP_ENDPOINT_FILE_BYTES_MAX: u64 = 4 << 20;
/// Bytes of a certificate or key file.
pub(crate) const EPP_PEM_FILE_BYTES_MAX: u64 = 1 << 20;

const _: () = assert!(EPP_BODY_PIECE_BYTES_MAX < 64 << 10);
const _: () = assert!(EPP_BODY_BYTES_MAX <= EPP_BODIES_BYTES_MAX);
const _: () = assert!(EPP_STREAM_WINDOW_BYTES < EPP_CONNECTION_WINDOW_BYTES);

// ---- engines: connections -----------------------------------------------------------------------------------------

/// The longest wait for a connection to an engine. A host that does not answer must not use up a request's deadline.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How long an idle connection to an engine is kept. vLLM's HTTP server closes it after 5 s
/// (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`); closing first avoids a request on a connection that is just being closed.
pub(crate) const POOL_IDLE_MAX: Duration = Duration::from_secs(4);
/// Idle connections kept for each engine: about as many as an engine runs requests at once.
pub(crate) const POOL_IDLE_CONNECTIONS_MAX: usize = 512;
/// Addresses of one name that become engines. A name with more is refused, not cut off.
pub(crate) const ADDRESSES_MAX: usize = 256;
/// Bytes of a file of certificate authorities. The file of a whole operating system has about 250 KiB.
pub(crate) const CA_FILE_BYTES_MAX: u64 = 4 << 20;

// ---- engines: health ----------------------------------------------------------------------------------------------

/// The back-off of an engine after its first failure. Each further one doubles it.
pub(crate) const BACK_OFF_FIRST: Duration = Duration::from_millis(250);
/// The longest back-off of an engine: an engine that comes back gets requests again within this time.
pub(crate) const BACK_OFF_MAX: Duration = Duration::from_secs(30);
/// The share of a back-off that chance takes away, so that engines which failed together are not probed together.
pub(crate) const BACK_OFF_JITTER: f64 = 0.25;
/// How long the one probe of an engine may stay without an end before another request probes.
pub(crate) const PROBE_MAX: Duration = Duration::from_secs(30);
/// How long an engine whose connection broke may take to say that it lives.
pub(crate) const ALIVE_MAX: Duration = Duration::from_secs(1);
/// Connections that may break one after the other before an engine backs off even if it says that it lives.
pub(crate) const BREAKS_IN_A_ROW_MAX: usize = 8;

// ---- engines: what they say of themselves ---------------------------------------------------------------------------

/// Bytes of an engine's reply about itself. SGLang's `/server_info` lists every argument and has some 20 KiB.
pub(crate) const REPLY_BYTES_MAX: usize = 1 << 20;
/// Bytes of an engine's `/metrics`. A server with 64 ranks has about 3 MiB.
pub(crate) const METRICS_BYTES_MAX: usize = 8 << 20;
/// Models and adapters of one engine. More are not listed, and the engine's problems say so.
pub(crate) const MODELS_PER_ENGINE_MAX: usize = 4096;
/// Bytes of a name that an engine gives: a model, a version, a topic, an endpoint.
pub(crate) const NAME_BYTES_MAX: usize = 512;
/// Data-parallel ranks of one engine, as many as the daemon has workers for one.
pub(crate) const RANKS_MAX: u64 = 4096;
/// Engines that are asked about themselves at once.
pub(crate) const LEARNING_MAX: usize = 16;
/// How often an engine is asked that has never answered. A fleet that starts together with the gateway is known soon.
pub(crate) const LEARN_AGAIN: Duration = Duration::from_secs(1);
/// The longest time that all questions to one engine may take.
pub(crate) const LEARN_MAX: Duration = Duration::from_secs(5);

// ---- tokens ---------------------------------------------------------------------------------------------------------

/// Tokens of a prompt, as many as the daemon accepts. A longer prompt is routed by load.
pub(crate) const PROMPT_TOKENS_MAX: usize = 1 << 21;
/// Bytes of a renderer's reply: the longest prompt with 7 digits and a comma for each token, three times over, because
/// the reply may have offsets too.
pub(crate) const RENDER_REPLY_BYTES_MAX: usize = 3 * 8 * PROMPT_TOKENS_MAX;
/// The longest wait for a renderer. A prompt of 100,000 tokens takes a few milliseconds; a busy server's images take
/// longer, and such a request is routed by load.
pub(crate) const RENDER_MAX: Duration = Duration::from_secs(3);
/// Bytes of the cache of rendered prompts: about 16 million tokens.
pub(crate) const TOKEN_CACHE_BYTES: u64 = 64 << 20;
/// Bytes that one entry of the cache takes beside its tokens.
pub(crate) const TOKEN_CACHE_ENTRY_BYTES: u64 = 128;
/// The usual size of an entry, by which the cache is laid out: 4,000 tokens.
pub(crate) const TOKEN_CACHE_USUAL_ENTRY_BYTES: u64 = 16 << 10;
/// Bodies that are being rendered at once. Beyond it a request is routed by load: a slow renderer must not collect
/// requests without end.
pub(crate) const RENDERS_IN_FLIGHT_MAX: usize = 1024;
/// Engines that are asked in turn for one body, as long as the time lasts.
pub(crate) const RENDER_ATTEMPTS_MAX: usize = 3;
/// Multimodal objects in a prompt.
pub(crate) const MEDIA_MAX: usize = 4096;
/// How long `/tokenize` is not used for a model and path after the engine counted another number of tokens.
pub(crate) const TOKENIZE_SUSPENDED: Duration = Duration::from_secs(600);

// ---- tokens: the local tokenizer --------------------------------------------------------------------------------------

/// Different prompts in a row whose local tokens must equal the engine's before they are used.
pub(crate) const LOCAL_PROOF_PROMPTS: usize = 200;
/// While a proof holds, one of this number of prompts is compared.
pub(crate) const LOCAL_PROVED_CHECK_EVERY: u64 = 50;
/// While a model is known to differ, one of this number of prompts is compared.
pub(crate) const LOCAL_DISPROVED_CHECK_EVERY: u64 = 5;
/// Comparisons at once, for all models. Prompts that come meanwhile are not compared: the traffic goes first.
pub(crate) const LOCAL_CHECKS_IN_FLIGHT_MAX: usize = 2;
/// Prompts that are tokenised locally at once for requests that wait. Each has a thread; the others wait for one.
pub(crate) const LOCAL_IN_FLIGHT_MAX: usize = 8;
/// How long a local tokenizer may take after the engines have used up the time for rendering.
pub(crate) const LOCAL_WAIT_MAX: Duration = Duration::from_secs(1);
/// Models, adapters and paths with a proof. Names come from engines, and this is their bound.
pub(crate) const LOCAL_PROOFS_MAX: usize = 4096;
/// Folders of the configuration.
pub(crate) const LOCAL_FOLDERS_MAX: usize = 64;
/// Bytes of `tokenizer.json`. Gemma 3's has 33 MiB.
pub(crate) const LOCAL_TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Bytes of `tokenizer_config.json` and of `special_tokens_map.json`. Gemma 3's has 1.1 MiB.
pub(crate) const LOCAL_CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Bytes of a chat template. Long ones have 20 KiB.
pub(crate) const LOCAL_TEMPLATE_BYTES_MAX: u64 = 1 << 20;
/// How long reading one folder may take.
pub(crate) const LOCAL_LOAD_MAX: Duration = Duration::from_secs(120);
/// Values of JSON that are read of one body, those in the arguments of its tool calls included. Each takes some 250 bytes
/// beside its text, whatever its length: a conversation of 10,000 messages has 40,000.
pub(crate) const LOCAL_VALUES_MAX: usize = 1 << 17;
/// Bytes of a prompt's text: the longest prompt of text with 4 bytes for each token.
pub(crate) const LOCAL_TEXT_BYTES_MAX: usize = 4 * PROMPT_TOKENS_MAX;
/// The work of one rendering. A unit is an instruction or 64 bytes: the longest prompt, written eight times over.
pub(crate) const LOCAL_TEMPLATE_FUEL: u64 = 8 * (LOCAL_TEXT_BYTES_MAX as u64) / 64;
/// Nested blocks and macros of a template: half of what minijinja allows by default.
pub(crate) const LOCAL_TEMPLATE_RECURSION: usize = 250;
/// How long the end of the process waits for local tokenizers that still work.
pub(crate) const LOCAL_END_MAX: Duration = Duration::from_secs(1);

// ---- parity ---------------------------------------------------------------------------------------------------------

/// Outcomes in a model's sliding window.
pub(crate) const PARITY_WINDOW: usize = 1000;
/// Compared requests below which nothing is concluded.
pub(crate) const PARITY_COMPARED_MIN: usize = 50;
/// Requests between two looks at the whole window.
pub(crate) const PARITY_JUDGED_EVERY: u64 = 10;
/// The least share of compared requests whose cached tokens must come out as predicted.
pub(crate) const PARITY_SHARE_MIN: f64 = 0.99;
/// The share of unexplained differences that must point to one cause for it to be named.
pub(crate) const PARITY_CAUSE_SHARE_MIN: f64 = 0.8;
/// The share of requests with cached tokens that may come without any predicted overlap. Beyond it the gateway hashes
/// other blocks than the engine.
pub(crate) const PARITY_UNFORESEEN_MAX: f64 = 0.5;
/// The share of requests that may be routed without tokens.
pub(crate) const PARITY_WITHOUT_TOKENS_MAX: f64 = 0.5;
/// Models that are watched. Names come from engines, and this is their bound.
pub(crate) const PARITY_MODELS_MAX: usize = 4096;

const _: () = assert!(LOCAL_TEMPLATE_FUEL * 64 <= 256 << 20, "a rendering's memory");
const _: () = assert!(BACK_OFF_FIRST.as_millis() < BACK_OFF_MAX.as_millis());
const _: () = assert!(BACK_OFF_JITTER >= 0.0 && BACK_OFF_JITTER < 1.0);
const _: () = assert!(POOL_IDLE_MAX.as_millis() < 5_000, "the engine must not be the first to close");
const _: () = assert!(PARITY_COMPARED_MIN <= PARITY_WINDOW);
const _: () = assert!(TOKEN_CACHE_USUAL_ENTRY_BYTES < TOKEN_CACHE_BYTES);

// ---- kubernetes -----------------------------------------------------------------------------------------------------

/// Objects in one page of a list, as Kubernetes' own clients ask for.
pub(crate) const KUBERNETES_PAGE_OBJECTS: usize = 500;
/// Bytes of one page. A pod has about 10 KiB, so that a usual page has 5 MiB.
pub(crate) const KUBERNETES_PAGE_BYTES_MAX: usize = 64 << 20;
/// Objects of one kind that are kept. A service's slice has up to 1,000 endpoints, a pool some hundred pods.
pub(crate) const KUBERNETES_OBJECTS_MAX: usize = 16_384;
/// Bytes of JSON of all objects of one kind that are kept, or that one list may bring: 16,384 pods of usual size.
pub(crate) const KUBERNETES_OBJECTS_BYTES_MAX: usize = 256 << 20;
/// Bytes of one event of a watch. etcd keeps no object of more than 1.5 MiB, which JSON can double.
pub(crate) const KUBERNETES_EVENT_BYTES_MAX: usize = 4 << 20;
/// Bytes of one watch. It is ended then, and begun again where it ended.
pub(crate) const KUBERNETES_WATCH_BYTES_MAX: usize = 1 << 30;
/// The shortest time for which a watch is asked for, in seconds. Kubernetes' own clients ask for 5 to 10 minutes.
pub(crate) const KUBERNETES_WATCH_SECONDS: u64 = 300;
/// How long a watch may last beyond the time that was asked for; then its connection counts as lost.
pub(crate) const KUBERNETES_WATCH_GRACE: Duration = Duration::from_secs(30);
/// How long one page, or the head of a watch's reply, may take.
pub(crate) const KUBERNETES_REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// A watch that lasted this long, or brought an event, forgets earlier failures: the next pause is the first one again.
pub(crate) const KUBERNETES_WATCH_HEALTHY_MIN: Duration = Duration::from_secs(5);
/// How long a silent connection is idle before the system asks whether the other side is there, and between its asks.
pub(crate) const KUBERNETES_KEEPALIVE: Duration = Duration::from_secs(15);
/// Unanswered asks after which a silent connection is lost.
pub(crate) const KUBERNETES_KEEPALIVE_ASKS: u32 = 3;
/// Bytes of a service account's token. A token has about 1 KiB.
pub(crate) const KUBERNETES_TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a reply that refuses a request.
pub(crate) const KUBERNETES_REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Bytes of a name, a namespace, a label or an id. Kubernetes allows 253 in a name and 317 in a label's key.
pub(crate) const KUBERNETES_NAME_BYTES_MAX: usize = 512;
/// Bytes of a message of the API server that a finding shows.
pub(crate) const KUBERNETES_MESSAGE_BYTES_MAX: usize = 512;
/// Ports of one pod: a pool has up to 8, and each is a data-parallel rank.
pub(crate) const KUBERNETES_PORTS_MAX: usize = 64;
/// Pods of one fleet, as many as the daemon's workers may be.
pub(crate) const KUBERNETES_PODS_MAX: usize = 4096;
/// Labels of a pool's selector, as many as its definition allows.
pub(crate) const KUBERNETES_LABELS_MAX: usize = 64;
/// How long the start waits for the first list of pods.
pub(crate) const KUBERNETES_FIRST_LIST_MAX: Duration = Duration::from_secs(10);

const _: () = assert!(KUBERNETES_EVENT_BYTES_MAX < KUBERNETES_WATCH_BYTES_MAX);
const _: () = assert!(KUBERNETES_PAGE_BYTES_MAX <= KUBERNETES_OBJECTS_BYTES_MAX);
const _: () = assert!(KUBERNETES_PAGE_OBJECTS <= KUBERNETES_OBJECTS_MAX);

// ---- serve: the sandbox -------------------------------------------------------------------------------------------

/// How often the gateway looks for system calls that its sandbox has refused, to log them.
pub(crate) const SANDBOX_WATCH_INTERVAL: Duration = Duration::from_millis(500);
