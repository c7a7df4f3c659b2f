//! TLS towards callers: a certificate and a key from files, which can be read again while connections go on.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::TlsFiles;

/// TLS of a listener.
pub struct ServerTls {
    files: TlsFiles,
    config: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub fn load(files: &TlsFiles) -> Result<Self, String> {
        Ok(Self { files: files.clone(), config: ArcSwap::from(read(files)?) })
    }

    /// Reads the files again, for new connections.
    ///
    /// # Errors
    /// Which file cannot be used, and why. The certificate stays as it was.
    pub fn reload(&self) -> Result<(), String> {
        self.config.store(read(&self.files)?);
        Ok(())
    }

    /// Shakes hands.
    pub(crate) async fn accept(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }
}

fn read(files: &TlsFiles) -> Result<Arc<ServerConfig>, String> {
    let TlsFiles { cert, key } = files;
    let bad_cert =
        |error: &dyn std::fmt::Display| format!("the certificate {} cannot be used: {error}", cert.display());
    let bad_key = |error: &dyn std::fmt::Display| format!("the private key {} cannot be used: {error}", key.display());
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(cert).and_then(Iterator::collect).map_err(|error| bad_cert(&error))?;
    if chain.is_empty() {
        return Err(bad_cert(&"the file has no PEM certificate"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad_key(&error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS cannot be set up: {error}"))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| bad_key(&format!("it does not fit the certificate {}: {error}", cert.display())))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
