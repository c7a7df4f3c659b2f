//! The table of the HTTP port.

use super::field;
use crate::config::HttpConfig;
use crate::config::field::{Fault, Kind, Preset, Reload, Section};
use crate::limits;

use Kind::{Flag, Integer, List, Parsed};
use Preset::{Absent, Value};

pub(in crate::config) static HTTP: Section<HttpConfig> = Section {
    name: "http",
    reload: Reload::Never,
    repeated: false,
    doc: "A port with the HTTP endpoints of Dynamo's standalone indexer and selection service, and /metrics. It asks for\n\
          # no credentials.",
    fields: &[
        field(
            "port",
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "Where it is served, by a thread of its own. 0: nowhere.",
        ),
        field(
            "listen",
            "",
            Value("127.0.0.1"),
            Parsed {
                what: "an IP address in quotes, such as \"127.0.0.1\"",
                set: |c, text| {
                    c.listen = text.parse().map_err(|_| Fault::new(format!("`{text}` is no IP address")))?;
                    Ok(())
                },
            },
            "The address it is bound to. On another than the loopback interface whoever reaches it may route and book.",
        ),
        field(
            "administer",
            "",
            Absent("true"),
            Flag { set: |c, v| c.administer = v },
            "Whether workers may be registered, removed and dumped by it. Absent: on the loopback interface. It must be said on another,\n\
             # and beside lists of who may connect in [serve] or [admin] or another admin.socket_mode: the port knows none of\n\
             # them.",
        ),
        field(
            "hosts",
            "",
            Value(""),
            List { items_max: limits::HTTP_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Names, without a port, by which it may be asked beside IP addresses and localhost. A Host that is another name is refused:\n\
             # the author of a web page can have a name lead here. \"*\": any name, where something before it checks the host.",
        ),
        field(
            "worker_hosts",
            "",
            Value(""),
            List {
                items_max: limits::HTTP_WORKER_HOSTS_MAX,
                bytes_max: limits::NAME_BYTES_MAX,
                set: |c, v| c.worker_hosts = v,
            },
            "Where the endpoints of a worker that is registered by HTTP may be: host names, IP addresses, networks (\"10.0.0.0/8\"),\n\
             # \"ipc\" for Unix sockets, \"*\" for every host. The daemon connects to them, and GET /workers says whether somebody\n\
             # answered. Empty: anywhere for callers on the loopback interface; for others their own IP address only.",
        ),
        field(
            "body_bytes_max",
            "bytes",
            Value("8388608"),
            Integer { min: 4096, max: limits::HTTP_BODY_BYTES_CEILING, set: |c, v| c.body_bytes_max = v },
            "Largest request body answered; a token takes some 7 bytes of JSON.",
        ),
        field(
            "dump_worker_ms_max",
            "milliseconds",
            Value("30000"),
            Integer { min: 1, max: limits::HTTP_DUMP_WORKER_MS_CEILING, set: |c, v| c.dump_worker_ms_max = v },
            "How long /dump may read one worker's blocks, whose own events wait meanwhile; what is not read by then is left out.",
        ),
    ],
};
