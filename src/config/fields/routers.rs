//! The table about the other routers of the fleet.

use std::path::PathBuf;

use super::live;
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
            "Where other routers hear this one. Without this and without nats it shares no load. Needs secret_file.",
        ),
        live(
            "peers",
            "",
            Value(""),
            List { items_max: limits::ROUTER_PEERS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.peers = v },
            "The `listen` addresses of the other routers: tcp://host:port or ipc://path. Its own may be among them, so that all routers\n\
             can have the same list.",
        ),
        restart!(
            routers.peers_dns,
            "",
            Absent("routers.kvrouted.svc:5571"),
            Parsed {
                what: "a string: host:port",
                set: |c, text| {
                    values::endpoint(&format!("tcp://{text}"))?;
                    let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
                    c.peers_dns = port.parse().ok().map(|port| (host.to_owned(), port));
                    Ok(())
                },
            },
            "A host name of which every address is a peer, such as that of a headless service of Kubernetes. Looked up every 5 s.",
        ),
        restart!(
            routers.peers_file,
            "",
            Absent("/run/kvrouted/peers"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.peers_file = Some(PathBuf::from(text)) },
            "A file with addresses as in peers, one on each line, read again every second. Replace it by renaming another one over it,\n\
             as `kvrouted-gateway peers` does with the pods behind a service of Kubernetes. Lines that begin with # are comments.",
        ),
        restart!(
            routers.name,
            "",
            Absent("router-1"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, text| c.name = Some(text.to_owned()) },
            "A name that no other router has, the same after a restart. Absent: the host's name and `listen`, or `nats_prefix`.",
        ),
        restart!(
            routers.nats,
            "",
            Value(""),
            List { items_max: limits::NATS_SERVERS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.nats = v },
            "NATS servers of one cluster over which routers hear each other, in place of listen and peers: nats://host:port, or\n\
             tls://host:port, which needs nats_ca_file. Needs secret_file, and a daemon built with the feature `nats`.",
        ),
        restart!(
            routers.nats_prefix,
            "",
            Value("kvrouted"),
            Parsed {
                what: "a string: words of letters, digits, - and _, with dots between them",
                set: |c, text| {
                    values::check_subject_prefix(text)?;
                    c.nats_prefix = text.to_owned();
                    Ok(())
                },
            },
            "What all NATS subjects begin with, the same at all routers of the fleet. Another fleet needs another one.",
        ),
        nats_login!(user of routers),
        nats_login!(secret_file of routers),
        nats_login!(credentials_file of routers),
        nats_login!(ca_file of routers),
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

/// What is wrong with the first text that is no NATS server.
pub(in crate::config) fn nats_fault(servers: &[String]) -> Option<ValueError> {
    servers.iter().find_map(|server| values::nats_server(server).err())
}

/// What is wrong with the first text that is no address of another router.
pub(in crate::config) fn peer_fault(peers: &[String]) -> Option<ValueError> {
    peers.iter().find_map(|peer| values::endpoint(peer).err())
}
