//! The picker's certificate: self-signed by default, because gateways expect TLS and verify nothing, or from files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::limits::{EPP_PEM_FILE_BYTES_MAX, EPP_REREAD_INTERVAL};

/// Where the certificate comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificate {
    /// Made at the start.
    SelfSigned,
    /// PEM files, read again after changes.
    Files {
        /// The certificate chain.
        certificate: PathBuf,
        /// The private key.
        key: PathBuf,
    },
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file is larger than any certificate.
    #[error("{path} is no PEM file: it has more than {EPP_PEM_FILE_BYTES_MAX} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A file is not PEM, or has nothing of the kind that is wanted.
    #[error("{path} has no {wanted} in PEM form: {error}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wanted.
        wanted: &'static str,
        /// Why.
        error: rustls::pki_types::pem::Error,
    },
    /// The key does not belong to the certificate, or has a kind that is not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
    /// A self-signed certificate cannot be made.
    #[error("cannot make a self-signed certificate: {0}")]
    SelfSigned(#[from] rcgen::Error),
}

/// Accepts TLS connections with the present certificate.
#[derive(Clone)]
pub(super) struct Tls {
    config: Arc<ArcSwap<ServerConfig>>,
    source: Certificate,
    /// The files' contents from which `config` was made.
    read: Arc<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    pub(super) async fn new(source: Certificate) -> Result<Self, CertificateError> {
        let (config, read) = match &source {
            Certificate::SelfSigned => (self_signed()?, (Vec::new(), Vec::new())),
            Certificate::Files { certificate, key } => {
                let read = (read(certificate).await?, read(key).await?);
                (of_files(certificate, key, &read)?, read)
            }
        };
        Ok(Self { config: Arc::new(ArcSwap::from_pointee(config)), source, read: Arc::new(read) })
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }

    /// Follows changes of the files, for ever. Files that cannot be used change nothing, and are logged once.
    pub(super) async fn follow_files(mut self) {
        let Certificate::Files { certificate, key } = self.source.clone() else {
            return std::future::pending().await;
        };
        let mut told = String::new();
        loop {
            tokio::time::sleep(EPP_REREAD_INTERVAL).await;
            match self.reread(&certificate, &key).await {
                Ok(true) => {
                    told.clear();
                    tracing::info!(certificate = %certificate.display(), "the certificate has changed");
                }
                Ok(false) => told.clear(),
                Err(error) if error.to_string() != told => {
                    told = error.to_string();
                    tracing::warn!(%error, "the present certificate stays in use");
                }
                Err(_) => {}
            }
        }
    }

    async fn reread(&mut self, certificate: &Path, key: &Path) -> Result<bool, CertificateError> {
        let read = (read(certificate).await?, read(key).await?);
        if read == *self.read {
            return Ok(false);
        }
        self.config.store(Arc::new(of_files(certificate, key, &read)?));
        self.read = Arc::new(read);
        Ok(true)
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    let failed = |error| CertificateError::Read { path: path.to_owned(), error };
    if tokio::fs::metadata(path).await.map_err(failed)?.len() > EPP_PEM_FILE_BYTES_MAX {
        return Err(CertificateError::TooLarge { path: path.to_owned() });
    }
    tokio::fs::read(path).await.map_err(failed)
}

fn of_files(certificate: &Path, key: &Path, read: &(Vec<u8>, Vec<u8>)) -> Result<ServerConfig, CertificateError> {
    let failed = |path: &Path, wanted, error| CertificateError::Pem { path: path.to_owned(), wanted, error };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&read.0)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(certificate, "certificate", error))?;
    let key = PrivateKeyDer::from_pem_slice(&read.1).map_err(|error| failed(key, "private key", error))?;
    config(chain, key)
}

fn self_signed() -> Result<ServerConfig, CertificateError> {
    let made = rcgen::generate_simple_self_signed(["kvrouted-epp".to_owned(), "localhost".to_owned()])?;
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    config(vec![made.cert.der().clone()], key)
}

fn config(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<ServerConfig, CertificateError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}
