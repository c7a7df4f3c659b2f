//! Where the programs are.

use std::path::{Path, PathBuf};

use crate::args::GatewayArgs;

/// Where programs are looked for.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    cache: PathBuf,
    gateway: Option<PathBuf>,
    /// The daemon's, if it is named.
    pub(crate) kvrouted: Option<PathBuf>,
}

impl Programs {
    /// As the command line and the environment say.
    #[must_use]
    pub(crate) fn of(args: &GatewayArgs) -> Self {
        let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        let cache = || std::env::var_os("KVROUTED_ENGINES").map(PathBuf::from);
        let cache = args.proxies.clone().or_else(cache).unwrap_or_else(|| home().join(".cache/kvrouted-engines"));
        Self { cache, gateway: args.gateway.clone(), kvrouted: args.kvrouted.clone() }
    }

    /// The gateway.
    ///
    /// # Errors
    /// What to do.
    pub(crate) fn gateway(&self) -> Result<PathBuf, String> {
        let beside = std::env::current_exe().ok().map(|own| own.with_file_name("kvrouted-gateway"));
        let found = match &self.gateway {
            Some(named) => named.is_file().then(|| named.clone()),
            None => beside.filter(|file| file.is_file()).or_else(|| in_path("kvrouted-gateway")),
        };
        found.ok_or_else(|| "there is no kvrouted-gateway: build gateway/ and name the program in --gateway".to_owned())
    }

    /// nginx: installed, or unpacked by `perf/fetch-proxies`.
    ///
    /// # Errors
    /// What to do.
    pub(crate) fn nginx(&self) -> Result<PathBuf, String> {
        let unpacked = self.cache.join("proxies/nginx/usr/sbin/nginx");
        let places = [PathBuf::from("/usr/sbin/nginx"), unpacked];
        let found = in_path("nginx").or_else(|| places.into_iter().find(|file| file.is_file()));
        found.ok_or_else(|| "nginx is not there: run perf/fetch-proxies".to_owned())
    }

    /// The newest Envoy of `scripts/gateways/fetch`, or the one that is installed.
    ///
    /// # Errors
    /// What to do.
    pub(crate) fn envoy(&self) -> Result<PathBuf, String> {
        let folders = std::fs::read_dir(self.cache.join("envoy")).into_iter().flatten().flatten();
        let fetched = folders.filter_map(|folder| {
            let file = folder.path().join("envoy/_bin/envoy");
            Some((version(&folder.file_name().to_string_lossy())?, file)).filter(|(_, file)| file.is_file())
        });
        let newest = fetched.max_by_key(|(version, _)| version.clone()).map(|(_, file)| file);
        newest.or_else(|| in_path("envoy")).ok_or_else(|| "Envoy is not there: run scripts/gateways/fetch".to_owned())
    }

    /// A program in the Python environment of a router.
    ///
    /// # Errors
    /// What to do.
    pub(crate) fn router(&self, router: &str, program: &str) -> Result<PathBuf, String> {
        let file = self.cache.join("proxies").join(router).join("bin").join(program);
        if file.is_file() { Ok(file) } else { Err(format!("{router} is not there: run perf/fetch-proxies")) }
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The numbers of a version; `None` = it is none.
fn version(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|number| number.parse().ok()).collect()
}

/// What a program says of its version, in one line.
#[must_use]
pub(crate) fn said_version(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program).args(arguments).output().ok()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    // Envoy's line begins with the path of its program.
    Some(line.split_once("version:").map_or(line, |(_, version)| version.trim()).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_the_largest_number() {
        assert!(version("1.40.0") > version("1.9.3"));
        assert_eq!(version("pip"), None);
    }
}
