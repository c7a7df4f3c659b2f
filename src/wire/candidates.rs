//! Writes the candidates of a reply.
//!
//! Each worker has a template: its candidate and its name, as bytes. A reply copies the template, then overwrites the
//! fields of the decision. A new version of the fleet table makes a new template.

use fb::Candidate;

use super::frame_composer::{FrameWriter, Layout, PADDING, REFERENCE, Template, element};
use super::schema_conversions::{COST_TERMS, state_to_wire, terms_to_wire, tiers_to_wire, trust_to_wire};
use crate::fleet::FleetTable;
use crate::ids::WorkerIndex;
use crate::route::Scored;
use crate::schema_generated::routing as fb;

const CANDIDATE: Layout<CANDIDATE_TABLE_BYTES, 20> = Layout::of(&[
    (Candidate::VT_DP_RANK, 4),
    (Candidate::VT_WORKER_ID, 8),
    (Candidate::VT_COST, 8),
    (Candidate::VT_OVERLAP, 16),
    (Candidate::VT_TRUST, 40),
    (Candidate::VT_NAME, REFERENCE),
    (Candidate::VT_TERMS, REFERENCE),
    (Candidate::VT_STATE, 1),
    (PADDING, 7),
]);
const CANDIDATE_TABLE_BYTES: usize = 96;

/// Bytes of a template. It has room for a name of 59 bytes; a candidate with a longer name is written without one.
const TEMPLATE_BYTES: usize = 160;

/// Bytes reserved for each candidate, with its name.
pub(super) const CANDIDATE_BYTES: usize = TEMPLATE_BYTES;

/// The templates of the workers that were listed: less than 200 bytes for each place of the fleet table.
#[derive(Default)]
pub(super) struct CandidateTemplates {
    /// By the worker's place.
    by_place: Vec<CachedTemplate>,
}

/// The template of one place, with the fleet version and the worker that it was made from.
#[derive(Clone, Copy, Default)]
struct CachedTemplate {
    /// `None` = nothing was made yet.
    fleet_version: Option<u64>,
    index: WorkerIndex,
    /// `None` = the worker has left, or its name is too long.
    template: Option<Template<TEMPLATE_BYTES>>,
}

impl CandidateTemplates {
    /// The template of a worker; `None` if it has left, or its name is too long.
    #[inline]
    fn of(&mut self, fleet: &FleetTable, index: WorkerIndex) -> Option<&Template<TEMPLATE_BYTES>> {
        let place = index.place();
        let is_current = |cached: &CachedTemplate| cached.fleet_version == Some(fleet.version) && cached.index == index;
        if !self.by_place.get(place).is_some_and(is_current) {
            self.make(fleet, index);
        }
        self.by_place[place].template.as_ref()
    }

    #[cold]
    fn make(&mut self, fleet: &FleetTable, index: WorkerIndex) {
        let place = index.place();
        if place >= self.by_place.len() {
            self.by_place.resize(place + 1, CachedTemplate::default());
        }
        let template = fleet
            .worker(index)
            .and_then(|record| Template::with_string((&mut CANDIDATE.blank(), Candidate::VT_NAME), &record.name));
        self.by_place[place] = CachedTemplate { fleet_version: Some(fleet.version), index, template };
    }
}

/// Writes candidates. All of them share one vtable.
pub(super) struct Candidates<'f, 'o> {
    frame: &'f mut FrameWriter<'o>,
    fleet: &'f FleetTable,
    templates: &'f mut CandidateTemplates,
    layout: usize,
    /// The vtable of their terms, if they are explained.
    terms_layout: Option<usize>,
}

impl<'f, 'o> Candidates<'f, 'o> {
    pub(super) fn begin(
        frame: &'f mut FrameWriter<'o>,
        explain: bool,
        (fleet, templates): (&'f FleetTable, &'f mut CandidateTemplates),
    ) -> Self {
        let mut candidate = CANDIDATE.blank();
        candidate.leave_out(Candidate::VT_TERMS, !explain);
        let layout = frame.vtable(candidate.vtable_bytes());
        let terms_layout = explain.then(|| frame.vtable(COST_TERMS.vtable_bytes()));
        Self { frame, fleet, templates, layout, terms_layout }
    }

    /// Writes a vector of candidates, each with its name and its terms after it. Returns its place.
    pub(super) fn write(&mut self, listed: &[Scored]) -> usize {
        let vector = self.frame.references(listed.len());
        for (n, scored) in listed.iter().enumerate() {
            let place = self.write_one(scored);
            self.frame.refer(element(vector, n), place);
        }
        vector
    }

    #[inline]
    fn write_one(&mut self, scored: &Scored) -> usize {
        let Some(template) = self.templates.of(self.fleet, scored.index) else { return self.write_whole(scored) };
        let (place, candidate) = self.frame.table_of_template::<CANDIDATE_TABLE_BYTES, _>(self.layout, template);
        fill(candidate, scored);
        if let Some(layout) = self.terms_layout {
            self.write_terms(layout, place, scored);
        }
        place
    }

    /// As [`Candidates::write_one`], without a template.
    #[cold]
    fn write_whole(&mut self, scored: &Scored) -> usize {
        let frame = &mut *self.frame;
        let mut candidate = CANDIDATE.blank();
        fill(candidate.bytes_mut(), scored);
        let place = match self.fleet.worker(scored.index) {
            Some(record) => {
                let place = frame.table_with_vtable(self.layout, &mut candidate);
                let name = frame.string(&record.name);
                frame.refer_field((&CANDIDATE, place), Candidate::VT_NAME, name);
                place
            }
            None => {
                // A worker that has just left has no name, and so another layout.
                candidate.leave_out(Candidate::VT_NAME, true);
                candidate.leave_out(Candidate::VT_TERMS, self.terms_layout.is_none());
                frame.table(candidate)
            }
        };
        if let Some(layout) = self.terms_layout {
            self.write_terms(layout, place, scored);
        }
        place
    }

    /// Writes the terms of the candidate at `place`, whose vtable is at `layout`.
    #[inline(never)]
    fn write_terms(&mut self, layout: usize, place: usize, scored: &Scored) {
        let terms = self.frame.table_with_vtable(layout, &mut terms_to_wire(&scored.terms));
        self.frame.refer_field((&CANDIDATE, place), Candidate::VT_TERMS, terms);
    }
}

/// Overwrites what a decision says of a worker in the bytes of its candidate.
#[inline(always)]
fn fill(candidate: &mut [u8], scored: &Scored) {
    CANDIDATE.overwrite(candidate, Candidate::VT_WORKER_ID, scored.worker.id.0.to_le_bytes());
    CANDIDATE.overwrite(candidate, Candidate::VT_DP_RANK, scored.worker.rank.0.to_le_bytes());
    CANDIDATE.overwrite(candidate, Candidate::VT_OVERLAP, tiers_to_wire(scored.overlap).0);
    CANDIDATE.overwrite(candidate, Candidate::VT_TRUST, trust_to_wire(scored.trust).0);
    CANDIDATE.overwrite(candidate, Candidate::VT_COST, scored.terms.cost.to_le_bytes());
    CANDIDATE.overwrite(candidate, Candidate::VT_STATE, [state_to_wire(scored.state).0]);
}
