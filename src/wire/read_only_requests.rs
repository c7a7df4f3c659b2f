//! Requests that only read, in both directions: overlaps, potential loads, the watch.

use super::decode_reply::{matched, worker_info};
use super::decode_request::{EVERY_SPACE, Request, RequestScratch, name, understood};
use super::encode_reply::ReplyEncoder;
use super::encode_request::{RequestEncoder, check_lengths};
use super::header::FrameKind;
use super::message::WatchReply;
use super::route_request_codec::{Question, SchemeFields, prompt, read_media};
use super::schema_conversions::match_to_wire;
use super::table::{Elements, Field, HotTable, TableReader, hot_tables};
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::CANDIDATES_MAX;
use crate::protocol::{PotentialLoad, PotentialLoads, ReplyNotes, RouteRequest};
use crate::schema_generated::routing as fb;

/// Two tables with the same fields: the prompt and the space.
macro_rules! question {
    ($name:ident, $asked:ident of $table:ident) => {
        hot_tables! {
            $asked of $table {
                space_id: u32 = VT_SPACE_ID,
                tokens: Elements<'a, u32> = VT_TOKENS,
                local_hashes: Elements<'a, u64> = VT_LOCAL_HASHES,
                scheme: Option<SchemeFields<'a>> = VT_SCHEME,
                token_count: u32 = VT_TOKEN_COUNT,
                lora: Option<&'a str> = VT_LORA,
                salt: Option<&'a str> = VT_SALT,
                media: Elements<'a, fb::MediaHash> = VT_MEDIA,
                must_understand: u64 = VT_MUST_UNDERSTAND,
            }
        }

        pub(super) fn $name<'a>(asked: &$asked<'a>, scratch: &'a mut RequestScratch) -> Result<RouteRequest<'a>> {
            understood(asked.must_understand)?;
            let question = Question {
                tokens: asked.tokens.bytes,
                local_hashes: asked.local_hashes.bytes,
                scheme: asked.scheme.as_ref(),
                token_count: asked.token_count,
            };
            Ok(RouteRequest {
                lora: name("lora", asked.lora)?,
                salt: name("salt", asked.salt)?,
                media: read_media(&asked.media, &mut scratch.media)?,
                candidates_max: CANDIDATES_MAX,
                ..RouteRequest::new(SpaceId(asked.space_id), prompt(&question)?)
            })
        }
    };
}

question!(overlap, OverlapFields of Overlap);
question!(potential_loads, PotentialLoadsFields of PotentialLoads);

pub(super) fn watch<'a>(table: &fb::Watch<'_>) -> Result<Request<'a>> {
    understood(table.must_understand())?;
    let space = (table.space_id() != EVERY_SPACE).then(|| SpaceId(table.space_id()));
    let (fleet_version_seen, page_limit) = (table.fleet_version_seen(), table.page_limit());
    Ok(Request::Watch { space, fleet_version_seen, page_limit })
}

impl RequestEncoder {
    /// Appends a watch of one space or of all, with a limit of workers for each reply, 0 = none. With `fleet_version_seen` 0 the
    /// daemon answers at once.
    pub fn watch(
        &mut self,
        id: CorrelationId,
        space: Option<SpaceId>,
        (fleet_version_seen, page_limit): (u64, u32),
        out: &mut Vec<u8>,
    ) {
        let space_id = space.map_or(EVERY_SPACE, |space| space.0);
        let args = fb::WatchArgs { space_id, fleet_version_seen, page_limit, ..fb::WatchArgs::default() };
        let root = fb::Watch::create(&mut self.builder, &args);
        self.finish(FrameKind::Watch, id, root, out);
    }

    /// Appends a request for potential loads. Only the request's prompt and space are sent.
    ///
    /// # Errors
    /// As [`RequestEncoder::route`].
    pub fn potential_loads(&mut self, id: CorrelationId, request: &RouteRequest<'_>, out: &mut Vec<u8>) -> Result<()> {
        check_lengths(request)?;
        let question = self.question(request);
        let args = fb::PotentialLoadsArgs {
            space_id: request.space.0,
            tokens: question.tokens,
            local_hashes: question.local_hashes,
            scheme: question.scheme,
            token_count: question.token_count,
            lora: question.lora,
            salt: question.salt,
            media: question.media,
            ..fb::PotentialLoadsArgs::default()
        };
        let root = fb::PotentialLoads::create(&mut self.builder, &args);
        self.finish(FrameKind::PotentialLoads, id, root, out);
        Ok(())
    }
}

impl ReplyEncoder {
    /// Answers a request for potential loads.
    pub fn potential_loads(&mut self, id: CorrelationId, potential: &PotentialLoads, out: &mut Vec<u8>) {
        self.loads.clear();
        for load in &potential.workers {
            let args = fb::PotentialLoadArgs {
                worker_id: load.worker.id.0,
                dp_rank: load.worker.rank.0,
                active_requests: u32::try_from(load.active_requests).unwrap_or(u32::MAX),
                prefill_tokens: load.prefill_tokens,
                decode_blocks: load.decode_blocks,
            };
            self.loads.push(fb::PotentialLoad::create(&mut self.builder, &args));
        }
        let loads = self.builder.create_vector(&self.loads);
        let args = fb::PotentialLoadsReplyArgs {
            loads: Some(loads),
            match_: match_to_wire(potential.matched),
            request_blocks: potential.request_blocks,
            notes: potential.notes.0,
        };
        let root = fb::PotentialLoadsReply::create(&mut self.builder, &args);
        self.finish(FrameKind::PotentialLoadsReply, id, root, out);
    }
}

pub(super) fn watch_reply(table: fb::WatchReply<'_>) -> Result<WatchReply> {
    let workers = table.workers().iter().map(worker_info).collect::<Result<_>>()?;
    Ok(WatchReply { workers, fleet_version: table.fleet_version(), next_cursor: table.next_cursor() })
}

pub(super) fn potential_loads_reply(table: fb::PotentialLoadsReply<'_>) -> Result<PotentialLoads> {
    let load = |load: fb::PotentialLoad<'_>| PotentialLoad {
        worker: Worker::new(load.worker_id(), load.dp_rank()),
        active_requests: u64::from(load.active_requests()),
        prefill_tokens: load.prefill_tokens(),
        decode_blocks: load.decode_blocks(),
    };
    Ok(PotentialLoads {
        workers: table.loads().iter().map(load).collect(),
        matched: matched(table.match_())?,
        request_blocks: table.request_blocks(),
        notes: ReplyNotes(table.notes()),
    })
}
