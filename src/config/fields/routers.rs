//! The table about the other routers of the fleet.

use std::path::PathBuf;

use crate::config::RoutersConfig;
use crate::config::field::{Kind, Preset, Section, ValueError};
use crate::config::values;
use crate::limits;

use Kind::{Integer, List, Parsed, Text};
use Preset::{Absent, Value};

pub(in crate::config) static ROUTERS: Section<RoutersConfig> = Section {
    name: "routers",
    repeated: false,
    doc: "The other routers of the fleet. Each router tells the others what its bookings add to each worker, and counts theirs. All\n\
          of them need the same [[space]] tables in the same order, and the same ids of workers.",
    fields: &[
        restart!(
            routers.listen,
            "",
            Absent("tcp://*:5571"),
            Parsed {
                what: "a string: tcp://*:port, tcp://address:port or ipc://path",
                set: |c, text| {
                    values::check_bound(text)?;
                    c.listen = Some(text.to_owned());
                    Ok(())
                },
            },
            "Where other routers hear this one. Absent: it shares no load. Needs secret_file.",
        ),
        restart!(
            routers.peers,
            "",
            Value(""),
            List { items_max: limits::ROUTER_PEERS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.peers = v },
            "The `listen` addresses of the other routers: tcp://host:port or ipc://path. Its own may be among them, so that all routers\n\
             can have the same list.",
        ),
        restart!(
            routers.name,
            "",
            Absent("router-1"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, text| c.name = Some(text.to_owned()) },
            "A name that no other router has, the same after a restart. Absent: the host's name and `listen`.",
        ),
        restart!(
            routers.secret_file,
            "",
            Absent("/etc/kvrouted/routers.secret"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.secret_file = Some(PathBuf::from(text)) },
            "A file with the secret of the fleet's routers, at least 32 bytes: head -c 32 /dev/urandom | base64. It authenticates what\n\
             they tell each other. White space at its end does not count.",
        ),
        restart!(
            routers.accepted_secret_file,
            "",
            Absent("/etc/kvrouted/routers.secret.other"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.accepted_secret_file = Some(PathBuf::from(text)) },
            "A second secret, only accepted. To change the secret: name the new one here at every router, then swap the two, then remove\n\
             the old one.",
        ),
        restart!(
            routers.batch_ms,
            "milliseconds",
            Value("2"),
            Integer { min: limits::LOAD_BATCH_MS_MIN, max: limits::LOAD_BATCH_MS_CEILING, set: |c, v| c.batch_ms = v },
            "How often this router tells what has changed. A longer time costs less processor time; routers then know each other's load\n\
             later.",
        ),
        restart!(
            routers.silent_ms_max,
            "milliseconds",
            Value("3000"),
            Integer {
                min: limits::LOAD_SILENT_MS_MIN,
                max: limits::LOAD_SILENT_MS_CEILING,
                set: |c, v| c.silent_ms_max = v,
            },
            "What a router booked no longer counts once it has said nothing for this long. Each says something every second.",
        ),
        restart!(
            routers.join_ms_max,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::LOAD_JOIN_MS_CEILING, set: |c, v| c.join_ms_max = v },
            "How long a router that starts may be not ready because the load of some peers is not known yet. It decides meanwhile.",
        ),
    ],
};

/// What is wrong with the first text that is no address of another router.
pub(in crate::config) fn peer_fault(peers: &[String]) -> Option<ValueError> {
    peers.iter().find_map(|peer| values::endpoint(peer).err())
}
