//! Limits of bookings, and the models of their load.

use super::prefill::PrefillModel;
use super::reporters::BackOff;
use crate::limits::{ACTIVE_WORDS_MAX, BOOKINGS_MAX};

/// Limits of bookings, and the models of their load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadsConfig {
    /// The age at which a booking ends.
    pub age_ms_max: u64,
    /// How long a session without connections keeps its bookings.
    pub session_grace_ms: u64,
    /// The secret of prompt and name hashes. Who chooses prompts must not know it, or could force collisions.
    pub secret: u64,
    /// The model of the duration of a prefill.
    pub prefill: PrefillModel,
    /// Whether output counts as decode blocks.
    pub track_output_blocks: bool,
    /// The back-off of a worker after a failure.
    pub back_off: BackOff,
    /// The age at which a load report is ignored.
    pub reported_load_ms_max: u64,
    /// The share of sessions, bookings and prompt memory that one user may take, percent.
    pub user_share_percent: u8,
    /// The most bookings.
    pub bookings_max: usize,
    /// The most words for the blocks of booked prompts.
    pub active_words_max: usize,
    /// Ended bookings that may wait for the journal; 0 = there is no journal.
    pub ended_waiting_max: usize,
    /// Ended bookings of traced requests that may wait for their span; 0 = nothing is traced.
    pub traced_waiting_max: usize,
}

impl Default for LoadsConfig {
    fn default() -> Self {
        let prefill = PrefillModel::Off;
        Self {
            age_ms_max: 300_000,
            session_grace_ms: 10_000,
            secret: 0,
            prefill,
            track_output_blocks: false,
            back_off: BackOff::default(),
            reported_load_ms_max: 5_000,
            user_share_percent: 100,
            bookings_max: BOOKINGS_MAX,
            active_words_max: ACTIVE_WORDS_MAX,
            ended_waiting_max: 0,
            traced_waiting_max: 0,
        }
    }
}
