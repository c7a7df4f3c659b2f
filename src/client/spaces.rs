//! The spaces of a daemon, under ids that stay the same when the daemon restarts.

use crate::error::{Error, Kind, Result};
use crate::ids::SpaceId;
use crate::limits::CLIENT_SPACES_MAX;
use crate::protocol::PoolRole;
use crate::wire::{SpaceInfo, WorkerInfo};

/// Finds the one space of `model`, of `namespace` and `role` if they are given.
///
/// # Errors
/// [`Kind::UnknownSpace`] if no space fits, with the models of the daemon, or if several fit.
pub(super) fn find<'a>(
    spaces: impl Iterator<Item = &'a SpaceInfo> + Clone,
    model: &str,
    namespace: Option<&str>,
    role: Option<PoolRole>,
) -> Result<&'a SpaceInfo> {
    let fits = |space: &&SpaceInfo| {
        let in_namespace = namespace.is_none_or(|wanted| space.namespace == wanted);
        space.model == model && in_namespace && role.is_none_or(|wanted| space.role == wanted)
    };
    let mut fitting = spaces.clone().filter(fits);
    match (fitting.next(), fitting.next()) {
        (Some(space), None) => Ok(space),
        (Some(_), Some(_)) => {
            let names: Vec<_> = spaces.filter(fits).map(|space| space.namespace.as_str()).collect();
            let what = format!("{model:?} is served in several spaces");
            Err(Error::new(Kind::UnknownSpace, what, format!("name one of the namespaces {names:?}")))
        }
        (None, _) => {
            let mut models: Vec<_> = spaces.map(|space| format!("{:?}", space.model)).collect();
            models.sort_unstable();
            models.dedup();
            let what = match namespace {
                Some(namespace) => format!("the daemon has no model {model:?} in the namespace {namespace:?}"),
                None => format!("the daemon has no model {model:?}"),
            };
            Err(Error::new(Kind::UnknownSpace, what, format!("it has {}", models.join(", "))))
        }
    }
}

#[derive(Clone, Debug)]
struct Known {
    /// With the client's own id.
    info: SpaceInfo,
    /// The id that the daemon of this connection uses; `None` = it has no such space.
    theirs: Option<SpaceId>,
    /// The daemon refused hashes by the scheme of its hello, so the client sends tokens.
    refuses_hashes: bool,
}

/// Every space of every daemon so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Spaces {
    known: Vec<Known>,
}

impl Spaces {
    /// Takes over the spaces of a daemon's hello.
    pub(super) fn learn(&mut self, spaces: &[SpaceInfo]) {
        self.known.iter_mut().for_each(|known| known.theirs = None);
        for space in spaces {
            let same = |known: &&mut Known| {
                let info = &known.info;
                (&info.model, &info.namespace, info.role) == (&space.model, &space.namespace, space.role)
            };
            if let Some(known) = self.known.iter_mut().find(same) {
                (known.theirs, known.info.scheme, known.refuses_hashes) = (Some(space.id), space.scheme, false);
                continue;
            }
            let taken = |id| self.known.iter().any(|known| known.info.id == id);
            let last = self.known.iter().map(|known| known.info.id.0).max();
            let free = || last.map_or(Some(0), |last| last.checked_add(1)).map(SpaceId);
            let id = if taken(space.id) { free() } else { Some(space.id) };
            // A daemon that has others each time gets no more.
            let Some(id) = id.filter(|_| self.known.len() < CLIENT_SPACES_MAX) else { continue };
            let info = SpaceInfo { id, ..space.clone() };
            self.known.push(Known { info, theirs: Some(space.id), refuses_hashes: false });
        }
    }

    /// The workers of known spaces, with the client's own ids of the spaces.
    pub(super) fn ours_of(&self, workers: Vec<WorkerInfo>) -> Vec<WorkerInfo> {
        let known = |info: WorkerInfo| Some(WorkerInfo { space: self.ours(info.space)?, ..info });
        workers.into_iter().filter_map(known).collect()
    }

    /// The spaces of this connection's daemon, or of the last connection's.
    pub(super) fn infos(&self) -> impl Iterator<Item = &SpaceInfo> + Clone {
        self.known.iter().filter(|known| known.theirs.is_some()).map(|known| &known.info)
    }

    /// The daemon's id of a space.
    ///
    /// # Errors
    /// [`Kind::UnknownSpace`].
    pub(super) fn theirs(&self, ours: SpaceId) -> Result<SpaceId> {
        let found = self.known.iter().find(|known| known.info.id == ours);
        let what = || match found {
            Some(known) => format!("the daemon no longer has the space of {:?}", known.info.model),
            None => format!("no space has the id {ours}"),
        };
        let unknown = || Error::new(Kind::UnknownSpace, what(), "ask for the space by its model");
        found.and_then(|known| known.theirs).ok_or_else(unknown)
    }

    /// The client's id of a space of the daemon.
    pub(super) fn ours(&self, theirs: SpaceId) -> Option<SpaceId> {
        self.known.iter().find(|known| known.theirs == Some(theirs)).map(|known| known.info.id)
    }

    /// The scheme of a space's block hashes; `None` = not known, or the daemon refused such hashes.
    pub(super) fn scheme_to_hash_by(&self, ours: SpaceId) -> Option<crate::ids::Scheme> {
        let known = self.known.iter().find(|known| known.info.id == ours)?;
        known.info.scheme.filter(|scheme| scheme.block_size > 0 && !known.refuses_hashes)
    }

    /// Notes that the daemon refused hashes: it has learnt another scheme since its hello.
    pub(super) fn hashes_were_refused(&mut self, ours: SpaceId) {
        self.known.iter_mut().filter(|known| known.info.id == ours).for_each(|known| known.refuses_hashes = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(id: u32, model: &str, role: PoolRole) -> SpaceInfo {
        SpaceInfo { id: SpaceId(id), model: model.into(), namespace: String::new(), role, scheme: None }
    }

    #[test]
    fn ids_stay_while_the_daemons_change() {
        let mut spaces = Spaces::default();
        spaces.learn(&[space(0, "a", PoolRole::Both), space(1, "b", PoolRole::Both)]);
        assert_eq!((spaces.theirs(SpaceId(1)).unwrap(), spaces.ours(SpaceId(0))), (SpaceId(1), Some(SpaceId(0))));
        spaces.learn(&[space(0, "b", PoolRole::Both), space(1, "c", PoolRole::Both)]);
        assert_eq!(spaces.theirs(SpaceId(1)).unwrap(), SpaceId(0), "b still has the id 1");
        assert_eq!(spaces.theirs(SpaceId(2)).unwrap(), SpaceId(1), "1 is taken: c gets the id 2");
        assert_eq!(spaces.ours(SpaceId(1)), Some(SpaceId(2)));
        let gone = spaces.theirs(SpaceId(0)).unwrap_err();
        assert!(gone.kind() == Kind::UnknownSpace && gone.message().contains("\"a\""), "{gone}");
        assert_eq!(spaces.infos().map(|info| info.id.0).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn spaces_of_other_names_each_time_stay_within_a_bound_and_no_id_is_beyond_the_last() {
        let mut spaces = Spaces::default();
        spaces.learn(&[space(u32::MAX, "a", PoolRole::Both), space(u32::MAX, "b", PoolRole::Both)]);
        assert_eq!(spaces.infos().map(|info| info.model.as_str()).collect::<Vec<_>>(), ["a"]);
        for hello in 0..2 {
            let named = |at| space(at, &format!("{hello}-{at}"), PoolRole::Both);
            spaces.learn(&(0..CLIENT_SPACES_MAX as u32 / 2).map(named).collect::<Vec<_>>());
        }
        assert_eq!(spaces.known.len(), 1 + CLIENT_SPACES_MAX / 2, "no id is free beyond the last");
        let named = |at| space(10_000 + at, &format!("more-{at}"), PoolRole::Both);
        spaces.learn(&(0..CLIENT_SPACES_MAX as u32).map(named).collect::<Vec<_>>());
        assert_eq!(spaces.known.len(), CLIENT_SPACES_MAX);
    }

    #[test]
    fn a_space_is_found_by_model_namespace_and_role() {
        let spaces = [space(0, "a", PoolRole::Prefill), space(1, "a", PoolRole::Decode)];
        assert!(find(spaces.iter(), "a", None, None).is_err(), "two fit");
        assert_eq!(find(spaces.iter(), "a", Some(""), Some(PoolRole::Decode)).unwrap().id, SpaceId(1));
        assert!(find(spaces.iter(), "b", None, None).unwrap_err().remedy().contains("\"a\""));
    }
}
