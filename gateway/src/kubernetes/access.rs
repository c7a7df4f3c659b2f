//! How the API server is reached: from within a pod by its service account, or by an explicit URL.

use std::path::{Path, PathBuf};

use hyper::Uri;
use hyper::header::HeaderValue;

use crate::engines::ClientTls;
use crate::limits::{KUBERNETES_NAME_BYTES_MAX, KUBERNETES_TOKEN_BYTES_MAX};

/// Where the kubelet puts a pod's service account.
pub const SERVICE_ACCOUNT_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How the API server is reached. The files are read again for each list and each watch, because the kubelet replaces
/// a token before it ends, after about an hour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiAccess {
    /// `https://HOST:PORT`, or `http://HOST:PORT` for `kubectl proxy`.
    pub url: String,
    /// A file with a bearer token; `None` = without one.
    pub token_file: Option<PathBuf>,
    /// A PEM file with the authorities of the server's certificate; `None` = those of the operating system.
    pub ca_file: Option<PathBuf>,
}

/// Why the API server cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// This process is in no pod, and no URL is named.
    #[error(
        "the environment has no {0}, so this is no pod of a cluster; name the API server's URL with --kubernetes-url"
    )]
    NoCluster(&'static str),
    /// The URL is none.
    #[error("the API server's URL {url} cannot be used: {why}; write https://HOST:PORT")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file cannot be used.
    #[error("the {what} file {} cannot be used: {why}", path.display())]
    File {
        /// What is in the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The authorities or the TLS library cannot be used.
    #[error("the API server cannot be reached by https: {0}")]
    Tls(String),
    /// A token would be readable on its way.
    #[error("a token is sent only by https, or to this machine; write https:// in the API server's URL")]
    PlainToken,
}

impl ApiAccess {
    /// That of a pod: the server by the environment, the token and the authorities from the service account's folder.
    /// Also the pod's namespace.
    ///
    /// # Errors
    /// The environment names no server, or the namespace cannot be read.
    pub fn in_cluster(variable: impl Fn(&str) -> Option<String>, folder: &Path) -> Result<(Self, String), AccessError> {
        let named = |name: &'static str| variable(name).filter(|value| !value.is_empty());
        let [host_name, port_name] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];
        let host = named(host_name).ok_or(AccessError::NoCluster(host_name))?;
        let port = named(port_name).ok_or(AccessError::NoCluster(port_name))?;
        let url =
            if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") };
        let path = folder.join("namespace");
        let wrong = |why: String| AccessError::File { what: "namespace", path: path.clone(), why };
        let namespace = read_short(&path, KUBERNETES_NAME_BYTES_MAX as u64).map_err(wrong)?;
        let (token_file, ca_file) = (Some(folder.join("token")), Some(folder.join("ca.crt")));
        let access = Self { url, token_file, ca_file };
        access.base()?;
        Ok((access, namespace))
    }

    /// Scheme, host and port.
    ///
    /// # Errors
    /// Not an http or https URL, or one with more than these; a token without TLS to another machine.
    pub fn base(&self) -> Result<Uri, AccessError> {
        let bad = |why| AccessError::Url { url: self.url.clone(), why };
        let uri: Uri = self.url.parse().map_err(|_| bad("it is not a URL"))?;
        let authority = uri.authority().ok_or_else(|| bad("it names no host"))?;
        if authority.as_str().contains('@') {
            // The name of the user may come with a password, which must not be shown.
            return Err(AccessError::Url { url: "(not shown)".to_owned(), why: "it has a user name" });
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(bad("it has a path"));
        }
        let host = authority.host().trim_matches(['[', ']']);
        let is_here = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        match uri.scheme_str() {
            Some("https") => Ok(uri),
            Some("http") if self.token_file.is_some() && !is_here => Err(AccessError::PlainToken),
            Some("http") => Ok(uri),
            _ => Err(bad("it begins with neither https:// nor http://")),
        }
    }

    /// The header with the token, as the file has it now.
    pub(super) fn authorization(&self) -> Result<Option<HeaderValue>, AccessError> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let wrong = |why: String| AccessError::File { what: "token", path: path.clone(), why };
        let token = read_short(path, KUBERNETES_TOKEN_BYTES_MAX).map_err(wrong)?;
        let header = HeaderValue::try_from(format!("Bearer {token}"));
        let mut header = header.map_err(|_| wrong("it has characters that no header may have".to_owned()))?;
        header.set_sensitive(true);
        Ok(Some(header))
    }

    pub(super) fn tls(&self) -> ClientTls {
        ClientTls { ca_file: self.ca_file.clone() }
    }
}

/// The only line of a short file.
fn read_short(path: &Path, bytes_max: u64) -> Result<String, String> {
    let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > bytes_max {
        return Err(format!("it has more than {bytes_max} bytes"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let line = text.trim();
    if line.is_empty() { Err("it is empty".to_owned()) } else { Ok(line.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("namespace"), "serving\n").expect("written");
        std::fs::write(folder.path().join("token"), "first\n").expect("written");
        folder
    }

    fn environment(host: &'static str) -> impl Fn(&str) -> Option<String> {
        move |name| match name {
            "KUBERNETES_SERVICE_HOST" => Some(host.to_owned()),
            "KUBERNETES_SERVICE_PORT" => Some("443".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn a_pod_finds_its_server_and_its_namespace_and_reads_its_token_again() {
        let folder = account();
        let (access, namespace) = ApiAccess::in_cluster(environment("10.96.0.1"), folder.path()).expect("a pod");
        assert_eq!((access.url.as_str(), namespace.as_str()), ("https://10.96.0.1:443", "serving"));
        assert_eq!(access.ca_file, Some(folder.path().join("ca.crt")));
        let token = || access.authorization().expect("a token").expect("a token").to_str().expect("text").to_owned();
        assert_eq!(token(), "Bearer first");
        std::fs::write(folder.path().join("token"), "second").expect("written");
        assert_eq!(token(), "Bearer second");
        let (access, _) = ApiAccess::in_cluster(environment("fd00::1"), folder.path()).expect("a pod");
        assert_eq!(access.base().expect("a URL").host(), Some("[fd00::1]"));
    }

    #[test]
    fn outside_of_a_cluster_the_remedy_is_named() {
        let folder = account();
        let error = ApiAccess::in_cluster(|_| None, folder.path()).expect_err("no pod");
        assert_eq!(error, AccessError::NoCluster("KUBERNETES_SERVICE_HOST"));
        assert!(error.to_string().contains("--kubernetes-url"));
        std::fs::write(folder.path().join("namespace"), "").expect("written");
        let error = ApiAccess::in_cluster(environment("10.96.0.1"), folder.path()).expect_err("no namespace");
        assert!(error.to_string().contains("it is empty"), "{error}");
    }

    #[test]
    fn a_url_is_scheme_host_and_port_and_no_token_goes_out_in_the_clear() {
        let with_token = |url: &str| ApiAccess { url: url.into(), token_file: Some("t".into()), ca_file: None }.base();
        for url in ["https://api:6443", "https://[fd00::1]:6443/", "http://127.0.0.1:8001", "http://[::1]:8001"] {
            assert!(with_token(url).is_ok(), "{url}");
        }
        assert_eq!(with_token("http://api:8001"), Err(AccessError::PlainToken));
        assert!(ApiAccess { url: "http://api:8001".into(), token_file: None, ca_file: None }.base().is_ok());
        for url in ["", "api:6443", "ftp://api", "https://api/k8s", "https://api?x=1", "https://me:secret@api"] {
            let error = with_token(url).expect_err(url);
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_token_that_cannot_be_a_header_is_refused_without_being_shown() {
        let folder = account();
        let path = folder.path().join("token");
        let access = ApiAccess { url: "https://a".into(), token_file: Some(path.clone()), ca_file: None };
        std::fs::write(&path, "sec\u{1}ret").expect("written");
        let error = access.authorization().expect_err("no header").to_string();
        assert!(error.contains("no header may have") && !error.contains("sec\u{1}"), "{error}");
        std::fs::write(&path, vec![b'a'; KUBERNETES_TOKEN_BYTES_MAX as usize + 1]).expect("written");
        assert!(access.authorization().is_err());
        std::fs::remove_file(&path).expect("removed");
        assert!(access.authorization().is_err());
    }
}
