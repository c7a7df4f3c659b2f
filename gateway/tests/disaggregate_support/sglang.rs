//! Two kinds of engines of SGLang 0.5: `--disaggregation-mode prefill` and `decode`.
//!
//! * `python/sglang/srt/server_args.py`: `/server_info` lists the mode and the bootstrap port.
//! * `srt/managers/io_struct.py`: `bootstrap_host`, `bootstrap_port` and `bootstrap_room` are values, or lists with one
//!   for each prompt. `srt/managers/scheduler.py`: an engine with a mode refuses a request without a room.
//! * `srt/disaggregation/decode.py`: the decode engine looks for the room at that host and port, and its first token
//!   comes after the blocks. `prefill.py`: the prefill engine answers one token when they are sent. Each waits for the
//!   other one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{Answer, Dead, Double, Fault, Output, Seen, error};

/// The bootstrap servers, and who is in which room.
pub(crate) struct Rooms {
    /// Changes with each entry.
    changed: watch::Sender<u64>,
    open: Mutex<BTreeMap<u64, Room>>,
    ports: Mutex<BTreeSet<u64>>,
}

#[derive(Default)]
struct Room {
    prefill_port: Option<u64>,
    has_decode: bool,
}

impl Rooms {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { changed: watch::Sender::new(0), open: Mutex::default(), ports: Mutex::default() })
    }

    /// Rooms that were entered.
    pub(crate) fn entered(&self) -> usize {
        self.open.lock().len()
    }

    fn enter(&self, room: u64, enter: impl FnOnce(&mut Room)) {
        enter(self.open.lock().entry(room).or_default());
        self.changed.send_modify(|count| *count += 1);
    }

    async fn until(&self, room: u64, holds: impl Fn(&Room) -> bool) {
        let mut changes = self.changed.subscribe();
        loop {
            if self.open.lock().get(&room).is_some_and(&holds) {
                return;
            }
            changes.changed().await.expect("the rooms live on");
        }
    }
}

/// A prefill engine with a bootstrap server at `port`.
pub(crate) async fn prefill(rooms: &Arc<Rooms>, port: u64) -> Double {
    rooms.ports.lock().insert(port);
    start(rooms, "prefill", port).await
}

/// A decode engine.
pub(crate) async fn decode(rooms: &Arc<Rooms>) -> Double {
    start(rooms, "decode", 8998).await
}

/// An engine for whole requests.
pub(crate) async fn whole(rooms: &Arc<Rooms>) -> Double {
    start(rooms, "null", 8998).await
}

async fn start(rooms: &Arc<Rooms>, mode: &'static str, port: u64) -> Double {
    let rooms = Arc::clone(rooms);
    let about = move |path: &str| match path {
        "/v1/models" => Some(json!({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "sglang"}]})),
        "/server_info" => Some(json!({
            "version": "0.5.9", "page_size": 16, "disaggregation_mode": mode, "disaggregation_bootstrap_port": port,
            "kv_events": null, "disable_radix_cache": false,
        })),
        _ => None,
    };
    Double::start(about, move |seen, fault| Box::pin(infer(seen, fault, Arc::clone(&rooms), mode, port))).await
}

async fn infer(seen: Seen, fault: Fault, rooms: Arc<Rooms>, mode: &'static str, port: u64) -> Answer {
    let refuse = |message: &str| Ok(super::json(400, &error(message)));
    let Ok(body) = serde_json::from_slice::<Value>(&seen.body) else { return refuse("no JSON") };
    if body["prompt"] == "refuse me" {
        return refuse("the prompt is too long");
    }
    if mode == "null" {
        return Ok(Output::of(&body, 16).reply(&seen.path, &body, ""));
    }
    let Some(numbers) = values(&body["bootstrap_room"]) else { return refuse("without a bootstrap room id") };
    let Some(ports) = values(&body["bootstrap_port"]) else { return refuse("without a bootstrap port") };
    let hosts = match &body["bootstrap_host"] {
        Value::Array(hosts) => hosts.clone(),
        host => vec![host.clone()],
    };
    // A list of numbers is one prompt of token ids.
    let lists = ["prompt", "text"].iter().filter_map(|field| body[*field].as_array());
    let prompts = lists.into_iter().find(|list| !list.iter().all(Value::is_number)).map_or(1, Vec::len);
    let is_good = |list: &[u64]| list.len() == prompts && list.iter().all(|number| *number < 1 << 63);
    if !is_good(&numbers) || !is_good(&ports) || hosts.iter().any(|host| host != "127.0.0.1") {
        return refuse("a wrong bootstrap address");
    }
    for (room, wanted) in numbers.iter().zip(&ports) {
        if mode == "prefill" {
            if *wanted != port {
                return refuse("the room of another engine");
            }
            rooms.enter(*room, |room| room.prefill_port = Some(port));
            rooms.until(*room, |room| room.has_decode).await;
        } else {
            if !rooms.ports.lock().contains(wanted) {
                return Ok(super::json(500, &error("no bootstrap server is there")));
            }
            rooms.enter(*room, |room| room.has_decode = true);
            rooms.until(*room, |room| room.prefill_port == Some(*wanted)).await;
        }
    }
    if fault == Fault::CloseAtTheEnd {
        return Err(Dead);
    }
    let output = match mode {
        "prefill" => Output { words: vec!["a"], ..Output::of(&body, 32) },
        _ => Output::of(&body, 0),
    };
    Ok(output.reply(&seen.path, &body, ""))
}

/// One number, or a list of them.
fn values(value: &Value) -> Option<Vec<u64>> {
    match value {
        Value::Array(values) => values.iter().map(Value::as_u64).collect(),
        value => Some(vec![value.as_u64()?]),
    }
}
