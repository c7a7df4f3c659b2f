//! Counts of what was asked of the API server, and of what came.

use std::sync::atomic::{AtomicU64, Ordering};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KubernetesKind {
    /// `endpointslices`
    EndpointSlices,
    /// `inferencepools`
    InferencePools,
    /// `pods`
    Pods,
}

impl KubernetesKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::EndpointSlices, Self::InferencePools, Self::Pods];

    /// The name of the resource in the API, in RBAC rules and in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::EndpointSlices => "endpointslices",
            Self::InferencePools => "inferencepools",
            Self::Pods => "pods",
        }
    }
}

/// What is counted of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KubernetesFigure {
    /// Whole lists.
    Listed,
    /// Watches that began.
    Watched,
    /// Events of watches, bookmarks included.
    Event,
    /// Lists that were needed again because the server no longer had the changes (`410 Gone`).
    Expired,
    /// Requests that the server refused, for want of rights above all.
    Refused,
    /// Requests and watches that failed otherwise.
    Failed,
    /// Objects that cannot be read and are left out.
    Unreadable,
}

impl KubernetesFigure {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Listed, Self::Watched, Self::Event, Self::Expired, Self::Refused, Self::Failed, Self::Unreadable];

    /// The name in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Listed => "listed",
            Self::Watched => "watched",
            Self::Event => "event",
            Self::Expired => "expired",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Unreadable => "unreadable",
        }
    }
}

/// The counts of one kind. They are figures for people, so that no order among them is needed.
#[derive(Debug, Default)]
pub struct KindFigures([AtomicU64; KubernetesFigure::ALL.len()]);

impl KindFigures {
    pub(super) fn count(&self, figure: KubernetesFigure) {
        self.add(figure, 1);
    }

    pub(super) fn add(&self, figure: KubernetesFigure, number: u64) {
        self.0[figure as usize].fetch_add(number, Ordering::Relaxed);
    }

    /// A count.
    #[must_use]
    pub fn get(&self, figure: KubernetesFigure) -> u64 {
        self.0[figure as usize].load(Ordering::Relaxed)
    }
}

/// The counts of all kinds.
#[derive(Debug, Default)]
pub struct KubernetesFigures([KindFigures; KubernetesKind::ALL.len()]);

impl KubernetesFigures {
    /// Those of one kind.
    #[must_use]
    pub fn of(&self, kind: KubernetesKind) -> &KindFigures {
        &self.0[kind as usize]
    }
}
