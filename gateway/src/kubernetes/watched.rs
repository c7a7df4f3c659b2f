//! The fleets that the bytes of a watch make, for the fuzz target: without a server, and with all kinds on one stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fleet::{Fleet, of_pool, of_slices};
use super::lines::Lines;
use super::objects::{EndpointSlice, InferencePool, OnlyMeta, Pod, Resource, WatchEvent, read_object, read_status};

/// Bytes of one event, and of all.
const LINE_BYTES_MAX: usize = 4 << 10;
const BYTES_MAX: usize = 1 << 20;

/// The fleet of a service and that of a pool, after the events of `bytes`, which come in pieces of this length.
///
/// # Errors
/// An event is too long, or is none.
pub fn read_watch(bytes: &[u8], piece: usize) -> Result<[Fleet; 2], String> {
    let mut lines = Lines::new(LINE_BYTES_MAX, BYTES_MAX);
    let (mut slices, mut pods, mut pool) = (BTreeMap::new(), BTreeMap::new(), None);
    for piece in bytes.chunks(piece.max(1)) {
        lines.feed(piece);
        while let Some(line) = lines.next()? {
            let event: WatchEvent<'_> = serde_json::from_slice(&line).map_err(|error| error.to_string())?;
            let _ = (read_status(event.object.get().as_bytes()), serde_json::from_str::<OnlyMeta>(event.object.get()));
            keep(&mut slices, read_object::<EndpointSlice>(event.object));
            keep(&mut pods, read_object::<Pod>(event.object));
            pool = read_object::<InferencePool>(event.object).or(pool);
        }
    }
    let of_service = of_slices(slices.values(), &[], true);
    Ok([of_service, of_pool("pool", pool.as_ref(), pods.values(), true)])
}

fn keep<T: Resource>(objects: &mut BTreeMap<String, Arc<T>>, object: Option<T>) {
    if let Some(object) = object {
        objects.insert(object.metadata().name.clone(), Arc::new(object));
    }
}
