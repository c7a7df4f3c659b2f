//! Where the daemon's program is.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::DaemonError;

/// Names the program for this process and for tests.
const VARIABLE: &str = "KVROUTED_BIN";
const NAME: &str = "kvrouted";

/// Finds the daemon's program: the one that `named` names, else the one in the environment variable `KVROUTED_BIN`,
/// beside this program's file, or in `PATH`.
///
/// # Errors
/// The places that were looked at.
pub fn find_program(named: Option<&Path>) -> Result<PathBuf, DaemonError> {
    find_among(&places(
        named,
        std::env::var_os(VARIABLE),
        std::env::current_exe().ok().as_deref(),
        std::env::var_os("PATH").as_deref(),
    ))
}

/// A program that is named is the only place: a typing mistake must not start another one.
fn places(named: Option<&Path>, variable: Option<OsString>, own: Option<&Path>, path: Option<&OsStr>) -> Vec<PathBuf> {
    if let Some(named) = named {
        return vec![named.to_owned()];
    }
    if let Some(named) = variable.filter(|named| !named.is_empty()) {
        return vec![named.into()];
    }
    let beside = own.and_then(Path::parent).map(|folder| folder.join(NAME));
    let searched: Vec<PathBuf> =
        path.into_iter().flat_map(std::env::split_paths).map(|folder| folder.join(NAME)).collect();
    beside.into_iter().chain(searched).collect()
}

fn find_among(places: &[PathBuf]) -> Result<PathBuf, DaemonError> {
    let found = places.iter().find(|place| place.is_file()).and_then(|place| std::path::absolute(place).ok());
    let shown = || places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ");
    found.ok_or_else(|| DaemonError::NoProgram { places: shown() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_program_is_the_only_place_and_the_path_comes_last() {
        let own = Path::new("/opt/gateway/kvrouted-gateway");
        let all = |named, variable: Option<&str>| {
            places(named, variable.map(OsString::from), Some(own), Some(OsStr::new("/usr/bin:/bin")))
        };
        assert_eq!(all(Some(Path::new("/a/k")), Some("/b/k")), [PathBuf::from("/a/k")]);
        assert_eq!(all(None, Some("/b/k")), [PathBuf::from("/b/k")]);
        let searched = ["/opt/gateway/kvrouted", "/usr/bin/kvrouted", "/bin/kvrouted"].map(PathBuf::from);
        assert_eq!(all(None, None), searched);
        assert_eq!(all(None, Some("")), searched, "an empty variable names nothing");
    }

    #[test]
    fn the_error_names_every_place() {
        let missing = [PathBuf::from("/nowhere/kvrouted"), PathBuf::from("/nowhere/else/kvrouted")];
        let error = find_among(&missing).unwrap_err().to_string();
        assert!(error.contains("/nowhere/kvrouted, /nowhere/else/kvrouted"), "{error}");
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("kvrouted");
        std::fs::write(&program, "").expect("a file");
        assert_eq!(find_among(&[missing[0].clone(), program.clone()]), Ok(program));
    }
}
