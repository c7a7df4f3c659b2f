//! TLS between hosts: version 1.3 only, certificates and keys from PEM files. The daemon shows a certificate and asks for
//! none: a caller shows a token instead. Sessions are not resumed, so that every connection is checked anew.

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::{Error, Kind, Result};
use crate::limits::REMOTE_FILE_BYTES_MAX;

/// What both sides say that they speak inside TLS. A server of another protocol does not answer to it.
const PROTOCOL: &[u8] = b"kvrouted-remote/1";
/// Permission bits of users who are neither the owner nor in the group.
const OTHERS: u32 = 0o007;

/// A file that cannot be used.
pub(crate) fn unusable(path: &Path, why: impl std::fmt::Display, remedy: &str) -> Error {
    Error::new(Kind::Config, format!("{} cannot be used: {why}", path.display()), remedy)
}

/// Reads a file of at most [`REMOTE_FILE_BYTES_MAX`].
fn read(path: &Path) -> Result<(Vec<u8>, std::fs::Metadata)> {
    let remedy = "check that the file exists and that this user may read it";
    let unread = |error: std::io::Error| unusable(path, error, remedy);
    // A pipe would not return.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unread)?;
    let metadata = file.metadata().map_err(unread)?;
    if !metadata.is_file() {
        return Err(unusable(path, "it is no regular file", remedy));
    }
    let mut bytes = Vec::new();
    file.take(REMOTE_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unread)?;
    if bytes.len() as u64 > REMOTE_FILE_BYTES_MAX {
        return Err(unusable(path, format!("it has more than {REMOTE_FILE_BYTES_MAX} bytes"), "name the right file"));
    }
    Ok((bytes, metadata))
}

/// Reads a file that must be kept from other users.
///
/// # Errors
/// [`Kind::Config`] if it cannot be read, or if every user may read or change it.
pub(crate) fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let (bytes, metadata) = read(path)?;
    if metadata.mode() & OTHERS != 0 {
        let mode = metadata.mode() & 0o777;
        let remedy = format!("run chmod o= {}; give the group read access if another user owns it", path.display());
        return Err(unusable(path, format!("its mode {mode:04o} lets every user of this host use it"), &remedy));
    }
    Ok(bytes)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let remedy = "write one or more certificates in PEM form, each with BEGIN CERTIFICATE and END CERTIFICATE";
    let (bytes, _) = read(path)?;
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| unusable(path, error, remedy))?;
    if found.is_empty() {
        return Err(unusable(path, "it has no certificate", remedy));
    }
    Ok(found)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn no_tls(error: rustls::Error) -> Error {
    Error::new(Kind::Internal, "TLS cannot be set up", "report it").caused_by(error)
}

/// The daemon's side, with its certificate chain and key.
///
/// # Errors
/// [`Kind::Config`] if a file cannot be used, or the key belongs to another certificate.
pub(crate) fn of_server(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>> {
    let chain = certificates(certificate)?;
    let key_text = read_secret(key)?;
    let remedy = "write the private key in PEM form (PKCS #8, PKCS #1 or SEC 1), without a passphrase";
    let private = PrivateKeyDer::from_pem_slice(&key_text).map_err(|error| unusable(key, error, remedy))?;
    let fits = format!("name the key of the first certificate in {}", certificate.display());
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(no_tls)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| unusable(key, error, &fits))?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A caller's side, which trusts the authorities of a file and no other.
///
/// # Errors
/// [`Kind::Config`] if the file cannot be used.
pub(crate) fn of_caller(authorities: &Path) -> Result<Arc<ClientConfig>> {
    let mut config = trusting(authorities)?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(Arc::new(config))
}

/// The side of a client of some server, which trusts the authorities of a file and no other.
///
/// # Errors
/// [`Kind::Config`] if the file cannot be used.
pub(crate) fn trusting(authorities: &Path) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(authorities)? {
        roots
            .add(authority)
            .map_err(|error| unusable(authorities, error, "name a file of authorities' certificates"))?;
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(no_tls)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn write(path: &Path, text: &str) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    #[test]
    fn a_pipe_or_a_folder_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        let refused = read_secret(&path).expect_err("refused");
        assert!(refused.kind() == Kind::Config && refused.to_string().contains("no regular file"), "{refused}");
        assert!(of_caller(folder.path()).expect_err("a folder").to_string().contains("no regular file"));
    }

    #[test]
    fn a_certificate_needs_its_own_key_and_both_need_pem() {
        let folder = tempfile::tempdir().unwrap();
        let [certificate, key, other] = ["certificate", "key", "other"].map(|name| folder.path().join(name));
        let made = || rcgen::generate_simple_self_signed(vec!["router.local".to_owned()]).unwrap();
        let (own, foreign) = (made(), made());
        write(&certificate, &own.cert.pem());
        write(&key, &own.signing_key.serialize_pem());
        write(&other, &foreign.signing_key.serialize_pem());
        of_server(&certificate, &key).expect("a pair");
        of_caller(&certificate).expect("an authority");
        let refused = of_server(&certificate, &other).expect_err("another key");
        assert!(refused.kind() == Kind::Config && refused.remedy().contains("certificate"), "{refused}");
        for (certificate, key) in [(&key, &key), (&certificate, &certificate)] {
            assert_eq!(of_server(certificate, key).expect_err("no PEM of that kind").kind(), Kind::Config);
        }
        assert_eq!(of_caller(&key).expect_err("no certificate").kind(), Kind::Config);
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
        let refused = of_server(&certificate, &key).expect_err("a key that all may read");
        assert!(refused.to_string().contains("0644"), "{refused}");
    }
}
