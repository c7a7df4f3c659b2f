//! Where the endpoints come from.
//!
//! A source gives complete lists. The picker replaces its table by each of them, so a source that cannot tell for a
//! while says nothing and the last table stays. Configuration, a file and DNS are one source
//! ([`ConfiguredEndpoints`]). A watch of Kubernetes' InferencePools and EndpointSlices can be another.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::endpoints::{Endpoint, EndpointConfig, EndpointTable, Endpoints};
use crate::limits::{EPP_ENDPOINT_FILE_BYTES_MAX, EPP_REREAD_INTERVAL, EPP_RESOLVE_TIMEOUT};

/// Gives complete lists of endpoints.
pub trait EndpointSource: Send + 'static {
    /// Waits until there is a list that differs from the last one. The first call returns as soon as anything is known.
    fn next(&mut self) -> impl Future<Output = Vec<Endpoint>> + Send;
}

/// Looks up names.
pub trait Resolve: Send + 'static {
    /// The addresses of a name.
    fn resolve(&self, name: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// The resolver of the operating system.
#[derive(Clone, Copy, Debug)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let found = tokio::time::timeout(EPP_RESOLVE_TIMEOUT, tokio::net::lookup_host((name, 0))).await??;
        Ok(found.map(|address| address.ip()).collect())
    }
}

/// Endpoints of the command line and of a file, with names looked up.
#[derive(Debug)]
pub struct ConfiguredEndpoints<R = SystemResolver> {
    fixed: Vec<EndpointConfig>,
    file: Option<PathBuf>,
    resolver: R,
    interval: Duration,
    /// The last good contents of the file.
    read: Vec<EndpointConfig>,
    /// The addresses that names had when they last resolved.
    resolved: Vec<(String, IpAddr)>,
    given: Option<Vec<Endpoint>>,
    /// What is wrong; logged when it changes.
    problems: Vec<String>,
}

impl ConfiguredEndpoints {
    /// Endpoints of the command line, and of a TOML file with `[[endpoint]]` tables, which is read again after changes.
    #[must_use]
    pub fn new(fixed: Vec<EndpointConfig>, file: Option<PathBuf>) -> Self {
        Self::with(fixed, file, SystemResolver, EPP_REREAD_INTERVAL)
    }
}

impl<R: Resolve + Sync> ConfiguredEndpoints<R> {
    /// The same with another resolver and interval.
    #[must_use]
    pub fn with(fixed: Vec<EndpointConfig>, file: Option<PathBuf>, resolver: R, interval: Duration) -> Self {
        Self {
            fixed,
            file,
            resolver,
            interval,
            read: Vec::new(),
            resolved: Vec::new(),
            given: None,
            problems: Vec::new(),
        }
    }

    /// What is wrong with the file or the names now.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Whether the list can change at all.
    fn can_change(&self) -> bool {
        self.file.is_some() || self.fixed.iter().any(|config| config.literal().is_none())
    }

    /// The list as it is now.
    async fn look(&mut self) -> Vec<Endpoint> {
        let mut problems = Vec::new();
        if let Some(path) = &self.file {
            match read_file(path).await {
                Ok(read) => self.read = read,
                Err(why) => problems.push(format!(
                    "the endpoint file {} cannot be used, its last good contents stay in use: {why}",
                    path.display()
                )),
            }
        }
        let mut endpoints = Vec::new();
        for config in self.fixed.iter().chain(&self.read) {
            let host = match config.literal() {
                Some(host) => Ok(host),
                None => one_address(&config.host, self.resolver.resolve(&config.host).await),
            };
            match host {
                Ok(host) => {
                    self.resolved.retain(|(name, _)| *name != config.host);
                    self.resolved.push((config.host.clone(), host));
                    endpoints.extend(config.at(host));
                }
                Err(why) => {
                    let last = self.resolved.iter().find(|(name, _)| *name == config.host);
                    problems.push(match last {
                        Some((_, host)) => format!("{why}; its last address {host} stays in use"),
                        None => format!("{why}; the endpoints {config} are not used"),
                    });
                    endpoints.extend(last.iter().flat_map(|(_, host)| config.at(*host)));
                }
            }
        }
        if problems != self.problems {
            problems.iter().for_each(|problem| tracing::warn!("{problem}"));
            self.problems = problems;
        }
        endpoints
    }
}

impl<R: Resolve + Sync> EndpointSource for ConfiguredEndpoints<R> {
    async fn next(&mut self) -> Vec<Endpoint> {
        if self.given.is_some() && !self.can_change() {
            return std::future::pending().await;
        }
        loop {
            if self.given.is_some() {
                tokio::time::sleep(self.interval).await;
            }
            let endpoints = self.look().await;
            if self.given.as_ref() != Some(&endpoints) {
                self.given = Some(endpoints.clone());
                return endpoints;
            }
        }
    }
}

/// Keeps a table equal to what a source gives, for ever.
pub async fn follow(mut source: impl EndpointSource, endpoints: Endpoints) {
    loop {
        let list = source.next().await;
        let (table, refused) = EndpointTable::of(list);
        for endpoint in refused {
            tracing::warn!(
                worker = endpoint.worker.id.0,
                rank = endpoint.worker.rank.0,
                address = %endpoint.address,
                "left out an endpoint whose worker or address another endpoint has; name each of them once"
            );
        }
        let number = table.len();
        if endpoints.replace(table) {
            tracing::info!(endpoints = number, "the endpoints have changed");
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointFile {
    #[serde(default)]
    endpoint: Vec<EndpointConfig>,
}

async fn read_file(path: &Path) -> Result<Vec<EndpointConfig>, String> {
    let length = tokio::fs::metadata(path).await.map_err(|error| error.to_string())?.len();
    if length > EPP_ENDPOINT_FILE_BYTES_MAX {
        return Err(format!("it has {length} bytes, more than {EPP_ENDPOINT_FILE_BYTES_MAX}"));
    }
    let text = tokio::fs::read_to_string(path).await.map_err(|error| error.to_string())?;
    toml::from_str::<EndpointFile>(&text).map(|file| file.endpoint).map_err(|error| error.message().to_owned())
}

/// The one address of a name, IPv4 before IPv6. Several addresses would be several engines under one id.
fn one_address(name: &str, found: io::Result<Vec<IpAddr>>) -> Result<IpAddr, String> {
    let mut found = found.map_err(|error| format!("the name {name} cannot be looked up: {error}"))?;
    found.sort_unstable(); // IPv4 first
    found.dedup();
    let of_one_kind = found.iter().filter(|address| address.is_ipv4() == found[0].is_ipv4()).count();
    match of_one_kind {
        0 => Err(format!("the name {name} has no address")),
        1 => Ok(found[0]),
        number => Err(format!(
            "the name {name} has {number} addresses, so they are several engines: give each engine a name and a worker \
             id of its own"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    type Name = (&'static str, Vec<&'static str>);

    /// Answers what the test says.
    #[derive(Clone, Default)]
    struct Names(Arc<Mutex<Vec<Name>>>);

    impl Names {
        fn set(&self, name: &'static str, addresses: &[&'static str]) {
            let mut names = self.0.lock();
            names.retain(|(known, _)| *known != name);
            names.push((name, addresses.to_vec()));
        }
    }

    impl Resolve for Names {
        async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
            let names = self.0.lock();
            let known = names.iter().find(|(known, _)| *known == name);
            let (_, addresses) = known.ok_or_else(|| io::Error::other("no such name"))?;
            Ok(addresses.iter().map(|address| address.parse().expect("an address")).collect())
        }
    }

    fn source(fixed: &[&str], file: Option<PathBuf>, names: &Names) -> ConfiguredEndpoints<Names> {
        let fixed = fixed.iter().map(|text| text.parse().expect("an endpoint")).collect();
        ConfiguredEndpoints::with(fixed, file, names.clone(), Duration::from_millis(1))
    }

    fn shown(endpoints: &[Endpoint]) -> Vec<String> {
        endpoints.iter().map(|e| format!("{}/{}={}", e.worker.id.0, e.worker.rank.0, e.address)).collect()
    }

    #[tokio::test]
    async fn a_name_is_looked_up_again_and_its_last_address_stays_while_it_cannot_be() {
        let names = Names::default();
        names.set("engine-2", &["10.0.0.9"]);
        let mut source = source(&["1=10.0.0.8:8000", "2=engine-2:8000,8001"], None, &names);
        assert_eq!(shown(&source.next().await), ["1/0=10.0.0.8:8000", "2/0=10.0.0.9:8000", "2/1=10.0.0.9:8001"]);
        names.set("engine-2", &["fd00::1", "10.0.0.10"]);
        let changed = source.next().await;
        assert_eq!(shown(&changed)[1..], ["2/0=10.0.0.10:8000", "2/1=10.0.0.10:8001"], "IPv4 before IPv6");
        names.set("engine-2", &[]);
        assert_eq!(source.look().await, changed);
        assert!(source.problems()[0].contains("10.0.0.10 stays in use"), "{:?}", source.problems());
    }

    #[tokio::test]
    async fn a_name_with_several_addresses_is_refused_with_the_remedy() {
        let names = Names::default();
        names.set("engines", &["10.0.0.8", "10.0.0.9"]);
        let mut source = source(&["1=engines:8000", "2=10.0.0.7:8000"], None, &names);
        assert_eq!(shown(&source.next().await), ["2/0=10.0.0.7:8000"]);
        let problem = &source.problems()[0];
        assert!(problem.contains("2 addresses") && problem.contains("of its own"), "{problem}");
    }

    #[tokio::test]
    async fn a_file_is_read_again_and_a_broken_one_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("endpoints.toml");
        let entry = |port| format!("[[endpoint]]\nworker = 3\nhost = \"10.0.0.8\"\nports = [{port}]\n");
        std::fs::write(&path, entry(8000)).expect("written");
        let mut source = source(&[], Some(path.clone()), &Names::default());
        assert_eq!(shown(&source.next().await), ["3/0=10.0.0.8:8000"]);
        std::fs::write(&path, entry(8001)).expect("written");
        assert_eq!(shown(&source.next().await), ["3/0=10.0.0.8:8001"]);
        for broken in ["[[endpoint", "[[endpoint]]\nworker = 3\n", "[[end_point]]\n"] {
            std::fs::write(&path, broken).expect("written");
            assert_eq!(shown(&source.look().await), ["3/0=10.0.0.8:8001"], "{broken}");
            assert_eq!(source.problems().len(), 1, "{broken}");
        }
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(shown(&source.look().await), ["3/0=10.0.0.8:8001"]);
    }
}
