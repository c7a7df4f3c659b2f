//! The example file.

/// A configuration file with every field, its default and its description. Fields without a default are comments.
#[must_use]
pub const fn example() -> &'static str {
    EXAMPLE
}

const EXAMPLE: &str = r#"# kvrouted-gateway serve: every field, with its default. Flags win over the file.
# A change takes effect at the next start. SIGHUP reads the files of certificates and of caller keys again.

# Where callers connect.
[listen]
# IP:PORT. HTTP/1.1 and HTTP/2; over TLS the caller chooses by ALPN.
address = "127.0.0.1:8080"
# Certificate chain and private key, as PEM files. Without them the port has no TLS. Reload: yes.
# tls_cert = "/etc/kvrouted/gateway.pem"
# tls_key = "/etc/kvrouted/gateway.key"

# The operator's endpoints: /metrics, /health, /ready and /findings. "" = off.
[admin]
# IP:PORT on the loopback interface.
address = "127.0.0.1:9464"

[daemon]
# The socket of a daemon that runs already. Without it the gateway runs a daemon of its own, and ends it at its end.
# socket = "/run/kvrouted/kvrouted.sock"
# The program of that daemon. Default: KVROUTED_BIN, `kvrouted` beside the gateway's program, or in PATH.
# program = "/usr/bin/kvrouted"
# The port of that daemon's own metrics on the loopback interface; 0 = off.
metrics_port = 0
# How that daemon chooses workers. latency: fewest seconds until the first token. kv: Dynamo's rule, fewest blocks.
mode = "latency"
# The namespace of the spaces. Default: the only one of each model.
# namespace = "team-a"
# How long one question may take, the wait in the daemon's queue included. After it the gateway chooses by itself.
timeout_ms = 1000
# Send 8 bytes for each block of a prompt in place of 4 for each token, for some work of the gateway's processor.
hash_locally = false

# Where the tokens of prompts come from: ids in the body, else a renderer, else the engine's /tokenize, else a local
# tokenizer that has been proved equal to the engine.
[tokens]
# Servers that only render (vllm launch render), as http(s)://HOST:PORT. They are asked before the engines.
renderers = []
# Ask renderers, those above and the engines' own. Rendering takes time of an engine's HTTP server.
render = true
# Use /tokenize where there is no renderer.
tokenize = true
# The longest wait for a renderer. After it the request is routed by load.
timeout_ms = 3000
# Bytes of the cache of rendered prompts.
cache_bytes_max = 67108864
# A local tokenizer. It is used once it gave the same tokens as the engine for many prompts in a row, and not any more
# after one difference; so it needs a renderer or /tokenize at first. vLLM's rules only.
# [[tokens.local]]
# The base model, as /v1/models of the engine names it.
# model = "Qwen/Qwen3-8B"
# A folder as Hugging Face lays it out: tokenizer.json, tokenizer_config.json, chat_template.jinja.
# folder = "/srv/models/Qwen3-8B"
# Use it before renderers and /tokenize. A share of the prompts still goes to the engine, to be compared.
# prefer = false

# Engines that are pods of a Kubernetes cluster, in place of [[engine]] tables. Of service and pool, one is named.
[kubernetes]
# [NAMESPACE/]NAME of a service: its ready pods are the engines.
# service = "serving/vllm"
# The port of the engines, by its name in the service or by number, or that of each data-parallel rank. Default: the
# service's only port. A pool names its ports itself.
ports = []
# [NAMESPACE/]NAME of an InferencePool (inference.networking.k8s.io/v1).
# pool = "serving/llama"
# The API server, as https://HOST:PORT. Default: that of the cluster whose pod this is, with the pod's account.
# url = "https://10.0.0.1:6443"
# A file with a bearer token for it. Reload: each request.
# token_file = "/etc/kvrouted/kubernetes.token"
# PEM file with its authorities. Default: the machine's own. Reload: each request.
# ca_file = "/etc/kvrouted/kubernetes-ca.crt"

# What holds for all engines.
[engines]
# PEM file with the authorities of https engines. Default: the machine's own.
# ca_file = "/etc/kvrouted/engines-ca.pem"
# A file whose only line is the API key of the engines.
# api_key_file = "/etc/kvrouted/engine.key"

# One table for each engine. Flags `--engine` replace all of them.
[[engine]]
# http(s)://HOST:PORT. With dns+ in front (dns+http://NAME:PORT), each address of the name is an engine, and the first
# one gets the id.
url = "http://10.0.0.8:8000"
# The daemon's worker id. Default: the place in this file, from 1.
# id = 1
# A file with this engine's API key, if it has one of its own.
# api_key_file = "/etc/kvrouted/engine-1.key"
# any, prefill or decode. With prefill and decode engines of a model, each request runs on one of both.
role = "any"
# The name in the engine's certificate. Default: the URL's host.
# tls_name = "engine-1.example.org"
# What the engine does not tell of itself; /findings says what is missing. Tokens in a block:
# block_size = 16
# The port of a prefill engine's bootstrap server (SGLang):
# bootstrap_port = 8998
# Where each rank publishes its events, and where lost events are asked for again:
# [[engine.rank]]
# rank = 0
# endpoint = "tcp://10.0.0.8:5557"
# replay = "tcp://10.0.0.8:5558"
# topic = ""

# What callers may hold. Beyond a bound they get 413, 431, or 503 with Retry-After.
[bounds]
# Memory of the process in bytes, divided among all that follows, the cache of rendered prompts and the replies that are
# read whole. What does not fit lowers the bounds below. 0 = 75 % of the cgroup's limit; without a limit, 25 % of the
# machine's memory. If the gateway runs the daemon, 0 = 20 %, and the daemon gets 55 %.
memory_bytes_max = 0
connections_max = 8192
requests_max = 4096
# Bytes of one body, and of all bodies that wait for an engine's first byte.
body_bytes_max = 33554432
bodies_bytes_max = 1073741824
# Bytes and number of a request's headers.
header_bytes_max = 65536
headers_max = 100

[deadlines]
# Until a request's headers are there; an idle connection is closed after this time too.
header_ms = 60000
# From the headers to the end of the body: 408 beyond it.
body_ms = 60000
# From the request to the first byte of a streamed reply: 504 beyond it.
first_byte_ms = 600000
# From the request to the end of the reply: 504, or the end of the stream with an error.
total_ms = 3600000
# For how long a caller may take nothing of its reply before the request is cancelled.
stall_ms = 60000
# For how long requests may go on after SIGTERM.
drain_ms = 60000

# A request goes to the next engine if one refuses the connection, ends it before the first byte of a reply, or answers
# 503. After the first byte no request is sent again.
[retry]
# Engines that one request may be sent to. 1 = no retry.
attempts_max = 3
# Larger bodies are sent once. Default: bounds.body_bytes_max.
body_bytes_max = 33554432

# What the gateway does with requests and replies. By default bodies go through unchanged.
[forward]
# What becomes of paths that the gateway does not know: refuse (404) or pass (to any usable engine). Engines have paths
# that change their state, so that only callers you trust should reach all of them.
unknown_paths = "refuse"
# Paths that begin so go to any usable engine even if unknown_paths is "refuse".
passed_prefixes = []
# Ask the engine for each stream's usage, and take the extra chunk out again where the caller did not ask. With it,
# every stream proves how many tokens were cached.
include_usage = false
# What becomes of kv_cache_report_mode, by which a caller makes vLLM announce cached blocks again: pass, strip or
# refuse.
kv_cache_report_mode = "pass"
# Send token ids in place of text to /v1/completions and /generate if the engine's own renderer gave them, so that the
# engine need not tokenise again.
token_ids = false
# Add x-kvrouted-worker and x-kvrouted-overlap-tokens to replies.
worker_headers = false

[callers]
# A TOML file of caller keys. Without it every caller is served. Reload: yes. For each key:
#   [[key]]
#   name = "team-a"                  # in logs and metrics; also the tenant, unless `tenant` says another
#   sha256 = "9f86d0…"               # of the key: printf %s "$KEY" | sha256sum
#   requests_per_minute = 600        # optional
#   burst = 60                       # optional; default: requests_per_minute / 10, at least 1
#   concurrent_max = 64              # optional
#   tenant = "team-a"                # optional
#   priority_max = 0                 # optional: callers with this key get at most this priority
# keys_file = "/etc/kvrouted/callers.toml"

# The priority of each objective that callers name in x-gateway-inference-objective. Higher goes first. The header
# x-kvrouted-priority names a priority itself, and wins.
[objectives]
# interactive = 10
# batch = -10

# For other proxies: POST /pick with a request's body answers the engines to send it to, best first.
[pick]
# socket = "/run/kvrouted/pick.sock"
# The mode bits of both sockets.
socket_mode = "660"
# IP:PORT on the loopback interface.
# address = "127.0.0.1:8081"
# Where access-log lines with `id=REQUEST-ID` go, each of which ends a pick: a UDP address on the loopback interface,
# a Unix datagram socket, or both. Under load, a Unix socket loses lines unless net.unix.max_dgram_qlen is raised.
# log_address = "127.0.0.1:8082"
# log_socket = "/run/kvrouted/pick-log.sock"
# A pick whose end never comes is freed after this time.
booking_ms_max = 600000

# What the gateway, and the daemon that it runs, give up once they have started: privileges, files and system calls that
# they do not need.
[sandbox]
# off: nothing. on: what the kernel can take. required: no start without all of it. report: nothing, but the kernel's audit
# log names the system calls that `on` would refuse.
mode = "off"

[log]
# off, error, warn, info, debug or trace.
level = "info"
"#;

#[cfg(test)]
mod tests {
    use super::super::{Flags, check, raw};
    use super::*;

    #[test]
    fn the_example_is_a_good_file_with_the_defaults() {
        let example = check::check(raw::parse(example()).expect("TOML"), &Flags::default()).expect("good");
        let flags = Flags { engines: vec!["http://10.0.0.8:8000".into()], ..Flags::default() };
        let defaults = check::check(raw::RawConfig::default(), &flags).expect("good");
        assert_eq!(format!("{example:?}"), format!("{defaults:?}"));
    }
}
