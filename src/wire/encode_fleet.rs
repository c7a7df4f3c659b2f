//! The daemon's frames that say who is there: spaces and workers, out of the fleet table.

use flatbuffers::WIPOffset;

use super::convert::{device_to_wire, role_to_wire, scheme_args, state_to_wire, trust_to_wire};
use super::encode_reply::{Builder, ReplyEncoder};
use super::header::FrameKind;
use super::message::{ServerLimits, WatchCursor};
use crate::fleet::{FleetTable, Space, WorkerRecord};
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{REPLY_BYTES_PER_TURN_MAX, WORKERS_PAGE_MAX};
use crate::schema_generated::routing as fb;

/// What a hello reply says besides the spaces.
#[derive(Clone, Copy, Debug)]
pub struct HelloFacts<'a> {
    /// The version both speak.
    pub version: u16,
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// The daemon's bounds.
    pub limits: ServerLimits,
    /// What the daemon serves: bits of [`features`](super::features).
    pub features: u64,
    /// Where status is answered.
    pub admin_socket: Option<&'a str>,
}

impl ReplyEncoder {
    /// Answers hello with `facts` and the spaces of `fleet`.
    pub fn hello(&mut self, id: CorrelationId, facts: &HelloFacts<'_>, fleet: &FleetTable, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let spaces: Vec<_> = fleet.spaces.iter().map(|space| encode_space(builder, space)).collect();
        let spaces = builder.create_vector(&spaces);
        let limits = facts.limits;
        let limits = fb::Limits::create(
            builder,
            &fb::LimitsArgs {
                frame_body_bytes_max: limits.frame_body_bytes_max,
                prompt_tokens_max: limits.prompt_tokens_max,
                candidates_max: limits.candidates_max,
                workers_page_max: limits.workers_page_max,
                bookings_per_session_max: limits.bookings_per_session_max,
            },
        );
        let admin_socket = facts.admin_socket.map(|path| builder.create_string(path));
        let args = fb::HelloReplyArgs {
            version: facts.version,
            instance_id: facts.instance_id,
            limits: Some(limits),
            features: facts.features,
            spaces: Some(spaces),
            admin_socket,
        };
        let root = fb::HelloReply::create(builder, &args);
        self.finish(FrameKind::HelloReply, id, root, out);
    }

    /// Answers a workers request with the page of `fleet` that starts at `cursor`.
    pub fn workers(
        &mut self,
        id: CorrelationId,
        fleet: &FleetTable,
        space: Option<SpaceId>,
        (cursor, limit): (u32, u32),
        out: &mut Vec<u8>,
    ) {
        let builder = &mut self.builder;
        let limit = if limit == 0 { WORKERS_PAGE_MAX } else { (limit as usize).min(WORKERS_PAGE_MAX) };
        let from = fleet.workers.partition_point(|record| record.index.place() < cursor as usize);
        let rest = &fleet.workers[from..];
        let mut listed = rest.iter().filter(|record| space.is_none_or(|space| record.space == space));
        let page: Vec<_> = listed.by_ref().take(limit).map(|record| encode_worker(builder, record)).collect();
        let next_cursor = listed.next().map_or(0, |record| record.index.place() as u32);
        let workers = builder.create_vector(&page);
        let args = fb::WorkersReplyArgs { workers: Some(workers), next_cursor, fleet_version: fleet.version };
        let root = fb::WorkersReply::create(builder, &args);
        self.finish(FrameKind::WorkersReply, id, root, out);
    }

    /// Answers a watch with a page of a space, or of the fleet, that begins at the worker in place `from.place` or behind it;
    /// with all of it where there is no limit. The page bears the version of `from`. Returns where the next page begins.
    pub fn watch(
        &mut self,
        id: CorrelationId,
        (fleet, space): (&FleetTable, Option<SpaceId>),
        (from, limit): (WatchCursor, Option<usize>),
        out: &mut Vec<u8>,
    ) -> Option<WatchCursor> {
        let builder = &mut self.builder;
        let is_watched = |record: &WorkerRecord| space.is_none_or(|space| record.space == space);
        let (mut page, mut next) = (Vec::new(), None);
        let first = fleet.workers.partition_point(|record| record.index.place() < from.place);
        for record in fleet.workers[first..].iter().filter(|record| is_watched(record)) {
            // Names, labels and adapters may be long: a page is bounded by bytes, too.
            let is_full = |limit| page.len() >= limit || builder.unfinished_data().len() >= REPLY_BYTES_PER_TURN_MAX;
            if !page.is_empty() && limit.is_some_and(is_full) {
                next = Some(WatchCursor { place: record.index.place(), ..from });
                break;
            }
            page.push(encode_worker(builder, record));
        }
        let workers = Some(builder.create_vector(&page));
        let next_cursor = next.map_or(0, |next| next.place as u32);
        let args = fb::WatchReplyArgs { workers, fleet_version: from.fleet_version, next_cursor };
        let root = fb::WatchReply::create(builder, &args);
        self.finish(FrameKind::WatchReply, id, root, out);
        next
    }
}

fn encode_space(builder: &mut Builder, space: &Space) -> WIPOffset<fb::Space<'static>> {
    let scheme = fb::Scheme::create(builder, &scheme_args(space.scheme.get()));
    let model = builder.create_string(&space.model);
    let namespace = builder.create_string(&space.namespace);
    let args = fb::SpaceArgs {
        space_id: space.id.0,
        model: Some(model),
        namespace: Some(namespace),
        role: role_to_wire(space.role),
        scheme: Some(scheme),
    };
    fb::Space::create(builder, &args)
}

fn encode_worker(builder: &mut Builder, record: &WorkerRecord) -> WIPOffset<fb::WorkerInfo<'static>> {
    let name = builder.create_string(&record.name);
    let taints: Vec<_> = record.taints.iter().map(|taint| builder.create_string(taint)).collect();
    let taints = builder.create_vector(&taints);
    let args = fb::WorkerInfoArgs {
        worker_id: record.worker.id.0,
        dp_rank: record.worker.rank.0,
        space_id: record.space.0,
        name: Some(name),
        state: state_to_wire(record.state),
        device_class: device_to_wire(record.device_class),
        weight: record.weight,
        capacity_blocks: record.capacity_blocks,
        batched_tokens_max: record.batched_tokens_max,
        taints: Some(taints),
        trust: Some(&trust_to_wire(record.trust.load())),
    };
    fb::WorkerInfo::create(builder, &args)
}
