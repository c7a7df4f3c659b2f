//! A daemon with a remote port, the certificates and tokens for it, and `kvrouted connect` processes that call it.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvrouted::client::Client;
use kvrouted::error::Error;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;

use super::ports::free_address;
use super::{Daemon, Process, WAIT_MAX, configure_serve, folder, options, replace, text, until};

/// The name in the daemon's certificate.
pub(crate) const SERVER_NAME: &str = "router.test";
/// Two principals' tokens, and one of nobody.
pub(crate) const EAST: &str = "east-0123456789abcdef0123456789abcdef";
pub(crate) const WEST: &str = "west-0123456789abcdef0123456789abcdef";
pub(crate) const STRANGER: &str = "none-0123456789abcdef0123456789abcdef";

/// A TLS connection of a test to the remote port.
pub(crate) type Tls = StreamOwned<ClientConnection, TcpStream>;

/// The files and the address of a daemon with a remote port.
pub(crate) struct Site {
    pub(crate) folder: Arc<TempDir>,
    pub(crate) address: SocketAddr,
}

impl Site {
    /// With the principals `east` and `west`.
    pub(crate) fn new() -> Self {
        let site = Self { folder: folder(), address: free_address() };
        let authority = Authority::new();
        site.write("ca.pem", &authority.certificate);
        site.write("other-ca.pem", &Authority::new().certificate);
        site.write_certificate(&authority);
        site.write_principals(&format!("east {EAST}\nwest {WEST}\n"));
        for (name, token) in [("east", EAST), ("west", WEST), ("stranger", STRANGER)] {
            site.write(&format!("{name}.token"), &format!("{token}\n"));
        }
        site
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces a file that only its owner may read.
    pub(crate) fn write(&self, name: &str, content: &str) {
        let path = self.path(name);
        let unfinished = path.with_extension("unfinished");
        std::fs::write(&unfinished, content).expect("written");
        std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o600)).expect("closed");
        std::fs::rename(unfinished, path).expect("renamed");
    }

    fn write_certificate(&self, authority: &Authority) {
        let (certificate, key) = authority.certify(SERVER_NAME);
        self.write("router.crt", &certificate);
        self.write("router.key", &key);
    }

    pub(crate) fn write_principals(&self, lines: &str) {
        self.write("principals", lines);
    }

    /// The table of the remote port.
    pub(crate) fn port_table(&self) -> String {
        let [certificate, key, principals] = ["router.crt", "router.key", "principals"].map(|name| self.path(name));
        format!(
            "[remote]\nlisten = \"{}\"\ncertificate_file = {certificate:?}\nkey_file = {key:?}\nprincipals_file = {principals:?}\n",
            self.address
        )
    }

    /// Writes the daemon's configuration: a worker, the remote port with settings `remote`, and more tables.
    pub(crate) fn configure(&self, serve: &str, remote: &str, tables: &str) -> PathBuf {
        let tables = format!("[[worker]]\nid = 1\n{}{remote}\n{tables}", self.port_table());
        configure_serve(self.folder.path(), serve, &tables)
    }

    /// A daemon on the configuration that was written last.
    pub(crate) fn daemon(&self) -> Daemon {
        let config = self.path("kvrouted.toml");
        Daemon::serve(Arc::clone(&self.folder), &["--config", text(&config)])
    }

    /// A daemon with everything at its default.
    pub(crate) fn plain_daemon(&self) -> Daemon {
        self.configure("", "", "");
        self.daemon()
    }

    /// A caller with the token of a file, and more flags. It listens when this returns.
    pub(crate) fn caller(&self, name: &str, more: &[&str]) -> Caller {
        let (socket, token) = (self.path(&format!("{name}.sock")), self.path(&format!("{name}.token")));
        let (to, authorities) = (self.address.to_string(), self.path("ca.pem"));
        let mut arguments = vec!["connect", "--socket", text(&socket), "--token-file", text(&token)];
        if !more.contains(&"--to") {
            arguments.extend(["--to", &to]);
        }
        if !more.contains(&"--ca-file") {
            arguments.extend(["--ca-file", text(&authorities)]);
        }
        if !more.contains(&"--server-name") {
            arguments.extend(["--server-name", SERVER_NAME]);
        }
        arguments.extend(more);
        let mut process = Process::start(self.folder.path(), &format!("connect-{name}"), &arguments);
        until("connect listens", || {
            assert!(process.is_running(), "connect ended: {}", process.log());
            // The file is there a moment before anything listens at it.
            process.log().contains("connecting")
        });
        Caller { process, socket }
    }

    /// A TCP connection to the port.
    pub(crate) fn tcp(&self) -> TcpStream {
        timed(TcpStream::connect(self.address).expect("a connection"))
    }

    /// The same from another address of this host.
    pub(crate) fn tcp_from(&self, source: Ipv4Addr) -> TcpStream {
        tcp_from(source, self.address).expect("a connection")
    }

    /// A TLS connection to the port, on which nothing was said yet.
    pub(crate) fn tls(&self) -> Tls {
        self.tls_over(self.tcp())
    }

    /// TLS on a connection to the port.
    pub(crate) fn tls_over(&self, stream: TcpStream) -> Tls {
        StreamOwned::new(tls_client(&self.path("ca.pem")), stream)
    }

    /// A TLS connection whose token was accepted.
    pub(crate) fn opened(&self, token: &str) -> Tls {
        opened(self.tls(), token)
    }
}

fn timed(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(WAIT_MAX)).expect("set");
    stream.set_write_timeout(Some(WAIT_MAX)).expect("set");
    stream
}

/// A TCP connection from an address of this host: on the loopback interface it has 2^24 of them.
pub(crate) fn tcp_from(source: Ipv4Addr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::from((source, 0)))?;
    connect(&socket, &to)?;
    Ok(timed(socket.into()))
}

/// The caller's side of TLS, which trusts the authorities of a file.
pub(crate) fn tls_client(authorities: &Path) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    let authorities = std::fs::read(authorities).expect("a file");
    for authority in CertificateDer::pem_slice_iter(&authorities) {
        roots.add(authority.expect("PEM")).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    let config = config.expect("TLS 1.3").with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(SERVER_NAME).expect("a name");
    ClientConnection::new(Arc::new(config), name).expect("a client")
}

/// A TLS connection once its token is accepted.
pub(crate) fn opened(mut tls: Tls, token: &str) -> Tls {
    tls.write_all(&opening(token)).expect("sent");
    let mut answer = [0; 8];
    tls.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, *b"KVRR\x01\0\0\0", "accepted");
    tls
}

/// The opening of a caller with a token.
pub(crate) fn opening(token: &str) -> Vec<u8> {
    let length = u16::try_from(token.len()).expect("short").to_le_bytes();
    [b"KVRR\x01\0", &length[..], token.as_bytes()].concat()
}

/// A `kvrouted connect` process.
pub(crate) struct Caller {
    pub(crate) process: Process,
    pub(crate) socket: PathBuf,
}

impl Caller {
    /// A client of the local socket.
    pub(crate) fn try_client(&self) -> Result<Client, Error> {
        Client::connect(&self.socket, &options())
    }

    #[track_caller]
    pub(crate) fn client(&self) -> Client {
        self.try_client().expect("a connection")
    }

    /// Why a client of the local socket gets no connection.
    #[track_caller]
    pub(crate) fn refusal(&self) -> Error {
        self.try_client().expect_err("no connection")
    }
}

/// An authority that certifies daemons.
pub(crate) struct Authority {
    pub(crate) certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// Certificate and key of a server, PEM.
    pub(crate) fn certify(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }
}

/// Gives a caller another token.
pub(crate) fn replace_token(path: &Path, token: &str) {
    replace(path, &format!("{token}\n"));
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("closed");
}
