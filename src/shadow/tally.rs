//! What a shadow policy's contrasts add up to, for one space.

use super::contrast::PolicyDifference;

/// Sums over decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShadowTally {
    /// Decisions judged.
    pub decisions: u64,
    /// Those where it chose the same worker.
    pub agreements: u64,
    /// Those where it chose another one.
    pub disagreements: u64,
    /// Of those, where the worker that was chosen was out of the running for it.
    pub excluded: u64,
    /// Those where only one of the two found anybody eligible; neither an agreement nor a disagreement.
    pub nobody: u64,
    /// Prompt blocks held by its choices and not by those that were made, over the decisions where it is ahead.
    pub blocks_saved: u64,
    /// The same over the decisions where it is behind.
    pub blocks_lost: u64,
    /// What the choices that were made cost it above its least, summed. Blocks, where its mode counts in blocks.
    pub cost_regret: f64,
}

impl ShadowTally {
    /// The counts by name, for metrics and status.
    #[must_use]
    pub const fn counts(&self) -> [(&'static str, &'static str, u64); 7] {
        [
            ("shadow_decisions", "Decisions judged by the shadow policy too.", self.decisions),
            ("shadow_agreements", "Decisions for which the shadow policy chose the same worker.", self.agreements),
            ("shadow_disagreements", "Decisions for which the shadow policy chose another worker.", self.disagreements),
            ("shadow_excluded", "Decisions whose worker was out of the running for the shadow policy.", self.excluded),
            ("shadow_nobody", "Decisions for which only one of the two policies found anybody eligible.", self.nobody),
            (
                "shadow_blocks_saved",
                "Prompt blocks that the shadow policy's workers held and the chosen ones did not.",
                self.blocks_saved,
            ),
            (
                "shadow_blocks_lost",
                "Prompt blocks that the chosen workers held and the shadow policy's did not.",
                self.blocks_lost,
            ),
        ]
    }

    /// Adds what another counted.
    pub fn merge(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.agreements += other.agreements;
        self.disagreements += other.disagreements;
        self.excluded += other.excluded;
        self.nobody += other.nobody;
        self.blocks_saved += other.blocks_saved;
        self.blocks_lost += other.blocks_lost;
        self.cost_regret += other.cost_regret;
    }

    /// Adds a contrast.
    pub fn add(&mut self, compare: PolicyDifference) {
        self.decisions += 1;
        match compare {
            PolicyDifference::Same => self.agreements += 1,
            PolicyDifference::Nobody => self.nobody += 1,
            PolicyDifference::Other { overlap_blocks, cost_regret } => {
                self.disagree(overlap_blocks);
                self.cost_regret += cost_regret;
            }
            PolicyDifference::Excluded { overlap_blocks } => {
                self.disagree(overlap_blocks);
                self.excluded += 1;
            }
        }
    }

    fn disagree(&mut self, overlap_blocks: i64) {
        self.disagreements += 1;
        let blocks = if overlap_blocks > 0 { &mut self.blocks_saved } else { &mut self.blocks_lost };
        *blocks += overlap_blocks.unsigned_abs();
    }
}
