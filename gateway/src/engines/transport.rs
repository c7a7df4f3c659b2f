//! Connections to engines: HTTP/1.1 with keep-alive, which both engines speak, over TCP or TLS.
//!
//! The roots of trust are the operating system's, or a file: engines of a company have certificates of the company's
//! own authority, which its hosts trust already. Roots compiled into the gateway would know none of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::HeaderName;
use hyper_rustls::{ConfigBuilderExt, FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use crate::limits::{CA_FILE_BYTES_MAX, CONNECT_MAX, POOL_IDLE_CONNECTIONS_MAX, POOL_IDLE_MAX};
use crate::memory::HeldReply;

/// An error of a body, whatever makes it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A request's body.
pub type BoxBody = UnsyncBoxBody<Bytes, BoxError>;
pub(super) type HttpClient = Client<HttpsConnector<HttpConnector>, BoxBody>;

/// Names the data-parallel rank to vLLM.
pub(crate) const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// A body of bytes that are there already.
#[must_use]
pub fn body_of(bytes: Bytes) -> BoxBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// Whom the gateway trusts when it connects to engines by https.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// A PEM file with certificate authorities; `None` = those of the operating system.
    pub ca_file: Option<PathBuf>,
}

impl ClientTls {
    /// The configuration for connections. Without `is_needed` it reads no file and trusts no authority.
    pub(crate) fn config(&self, is_needed: bool) -> Result<Arc<ClientConfig>, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("the TLS library refuses its own defaults: {error}"))?;
        let builder = match (&self.ca_file, is_needed) {
            (_, false) => builder.with_root_certificates(RootCertStore::empty()),
            (Some(file), true) => builder.with_root_certificates(roots_of(file)?),
            (None, true) => builder.with_native_roots().map_err(|error| {
                format!("the operating system's certificate authorities cannot be read: {error}; name a CA file")
            })?,
        };
        Ok(Arc::new(builder.with_no_client_auth()))
    }
}

fn roots_of(file: &Path) -> Result<RootCertStore, String> {
    let failed = |why: String| format!("the CA file {} cannot be used: {why}", file.display());
    let length = std::fs::metadata(file).map_err(|error| failed(error.to_string()))?.len();
    if length > CA_FILE_BYTES_MAX {
        return Err(failed(format!("it has more than {CA_FILE_BYTES_MAX} bytes")));
    }
    let pem = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| failed(format!("it is not PEM: {error}")))?;
        roots.add(certificate).map_err(|error| failed(format!("it has an unusable certificate: {error}")))?;
    }
    if roots.is_empty() { Err(failed("it has no certificate".to_owned())) } else { Ok(roots) }
}

/// A pool of connections to one engine. Certificates are checked against `tls_name`, or the URL's host.
pub(super) fn client(tls: &ClientConfig, tls_name: Option<&str>) -> Result<HttpClient, String> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_MAX));
    tcp.set_keepalive(Some(Duration::from_secs(30)));
    let mut builder = HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http();
    if let Some(name) = tls_name {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| format!("{name:?} is not a server name"))?;
        builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    let connector = builder.enable_http1().wrap_connector(tcp);
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE_MAX)
        .pool_max_idle_per_host(POOL_IDLE_CONNECTIONS_MAX)
        .build(connector);
    Ok(client)
}

/// Why a reply's body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is longer than allowed.
    #[error("the reply has more than {0} bytes")]
    TooLong(usize),
    /// All replies together take as much memory as they may.
    #[error("the gateway has no memory for it (bounds.memory_bytes_max)")]
    NoRoom,
    /// It did not end in time.
    #[error("the reply did not end in time")]
    TimedOut,
    /// The connection broke.
    #[error("the connection broke within the reply")]
    Broken(#[source] hyper::Error),
}

/// A whole reply, which counts until its last part is dropped.
struct WholeReply {
    bytes: BytesMut,
    _held: HeldReply,
}

impl AsRef<[u8]> for WholeReply {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a whole reply of at most `bytes_max` bytes. A reply that says it is longer is not read at all.
///
/// # Errors
/// A reply that is too long, too slow, or cut off, or for which there is no memory.
pub async fn read_bounded(mut body: Incoming, bytes_max: usize, deadline: Instant) -> Result<Bytes, ReadError> {
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(ReadError::TooLong(bytes_max));
    }
    let read = async {
        let (mut bytes, mut held) = (BytesMut::new(), HeldReply::default());
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(ReadError::Broken)?.into_data() else { continue };
            if bytes.len() + data.len() > bytes_max {
                return Err(ReadError::TooLong(bytes_max));
            }
            if !held.grow(data.len()) {
                return Err(ReadError::NoRoom);
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Bytes::from_owner(WholeReply { bytes, _held: held }))
    };
    tokio::time::timeout_at(deadline.into(), read).await.unwrap_or(Err(ReadError::TimedOut))
}
