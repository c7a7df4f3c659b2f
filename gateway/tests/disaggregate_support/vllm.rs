//! Two kinds of engines of vLLM 0.32 with the NIXL connector.
//!
//! * `vllm/sampling_params.py`: `min_tokens` beyond `max_tokens` is refused; `entrypoints/openai/*/protocol.py`:
//!   `stream_options` without `stream` is refused.
//! * `distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`, `request_finished`: a request with
//!   `do_remote_decode` that ended by its length keeps its blocks, and its whole reply says where they are; nothing of it
//!   is in a stream. `update_state_after_alloc`: a request with `do_remote_prefill` reads them if all four names are
//!   there, and computes its prompt otherwise.
//! * `pull_worker.py`, `_get_new_notifs`: the first whole read frees them. A later one reads other requests' blocks; the
//!   engine only logs that. The doubles count it.
//! * `entrypoints/generate/base/serving.py`, `_with_kv_transfer_rejection_cleanup`: a decode engine that refuses a
//!   request gives the blocks back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{Answer, Dead, Double, Fault, Output, Seen, error};

/// The blocks that prefill engines keep.
#[derive(Default)]
pub(crate) struct Kept {
    /// `remote_request_id`, and the text of the parameters that name its blocks.
    blocks: Mutex<BTreeMap<String, String>>,
    requests: AtomicUsize,
    wrong_reads: AtomicUsize,
    reads: AtomicUsize,
    prompts_computed_by_decode: AtomicUsize,
    lost: AtomicUsize,
}

impl Kept {
    /// Reads of blocks that were read before, or never kept.
    pub(crate) fn wrong_reads(&self) -> usize {
        self.wrong_reads.load(Ordering::SeqCst)
    }

    pub(crate) fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }

    /// So many reads find that the engine with the blocks is gone.
    pub(crate) fn lose_blocks(&self, reads: usize) {
        self.lost.store(reads, Ordering::SeqCst);
    }

    /// Prompts that a decode engine computed itself.
    pub(crate) fn computed_by_decode(&self) -> usize {
        self.prompts_computed_by_decode.load(Ordering::SeqCst)
    }
}

/// An engine that shares `kept` with the others; without a connector it knows nothing of transfers.
pub(crate) async fn engine(kept: &Arc<Kept>, has_connector: bool) -> Double {
    let kept = Arc::clone(kept);
    Double::start(about, move |seen, fault| Box::pin(infer(seen, fault, Arc::clone(&kept), has_connector))).await
}

fn about(path: &str) -> Option<Value> {
    match path {
        "/v1/models" => Some(json!({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})),
        "/version" => Some(json!({"version": "0.32.0"})),
        _ => None,
    }
}

async fn infer(seen: Seen, fault: Fault, kept: Arc<Kept>, has_connector: bool) -> Answer {
    let refuse = |message: &str| Ok(super::json(400, &error(message)));
    let Ok(body) = serde_json::from_slice::<Value>(&seen.body) else { return refuse("no JSON") };
    if body["stream"] != true && !body["stream_options"].is_null() {
        return refuse("stream options need a stream");
    }
    let most = body["max_tokens"].as_u64().unwrap_or(8);
    if body["min_tokens"].as_u64().is_some_and(|least| least > most) {
        return refuse("min_tokens must be at most max_tokens");
    }
    if !matches!(body["model"].as_str(), None | Some("m")) {
        return Ok(super::json(404, &error("no such model")));
    }
    if body["prompt"] == "refuse me" {
        return refuse("the prompt is too long");
    }
    let params = &body["kv_transfer_params"];
    if params["do_remote_decode"] == true && has_connector {
        return prefill(&seen, &body, fault, &kept);
    }
    let cached = if params["do_remote_prefill"] == true && has_connector {
        // `kv_load_failure_policy` is `fail`.
        let is_lost = kept.lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |lost| lost.checked_sub(1)).is_ok();
        match (is_lost, body["stream"] == true) {
            (true, true) => return Ok(super::events(vec![format!("data: {}\n\n", error("no blocks"))])),
            (true, false) => return Ok(super::json(500, &error("no blocks"))),
            (false, _) => read(&seen, params, &kept),
        }
    } else {
        kept.prompts_computed_by_decode.fetch_add(1, Ordering::SeqCst);
        0
    };
    if fault == Fault::CloseAtTheEnd {
        return Err(Dead);
    }
    Ok(Output::of(&body, cached).reply(&seen.path, &body, r#","kv_transfer_params":null"#))
}

/// Computes a prompt, and keeps its blocks.
fn prefill(seen: &Seen, body: &Value, fault: Fault, kept: &Kept) -> Answer {
    let names = ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"];
    let is_empty = names.iter().all(|name| body["kv_transfer_params"].get(*name) == Some(&Value::Null));
    if !is_empty || body["stream"] == true {
        return Ok(super::json(400, &error("this is no prefill")));
    }
    let number = kept.requests.fetch_add(1, Ordering::SeqCst);
    let id = format!("cmpl-{}-{number}", seen.header("x-request-id").unwrap_or_default());
    // Written as no serialiser would write it again.
    let params = format!(
        r#"{{"do_remote_prefill": true,"do_remote_decode":false, "remote_block_ids":[[1, 2,3]],"remote_engine_id":"e1","remote_request_id":"{id}","remote_host":"10.9.8.7","remote_port":5600,"tp_size":1,"x":1.50}}"#
    );
    kept.blocks.lock().insert(id, params.clone());
    if fault == Fault::CloseAtTheEnd {
        return Err(Dead);
    }
    Ok(Output::of(body, 32).reply(&seen.path, body, &format!(r#","kv_transfer_params":{params}"#)))
}

/// Reads the blocks that a prefill engine kept. The tokens that came from elsewhere.
fn read(seen: &Seen, params: &Value, kept: &Kept) -> u64 {
    kept.reads.fetch_add(1, Ordering::SeqCst);
    let id = params["remote_request_id"].as_str().unwrap_or_default();
    match kept.blocks.lock().remove(id) {
        Some(text) if seen.text().contains(&text) => {}
        Some(_) | None => {
            kept.wrong_reads.fetch_add(1, Ordering::SeqCst);
        }
    }
    40
}
