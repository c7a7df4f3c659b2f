//! Health, TLS, Unix sockets, and the picker's end.

use std::path::Path;
use std::sync::Arc;

use kvrouted_gateway::epp::messages::*;
use kvrouted_gateway::epp::{Certificate, CertificateError, EppServer, Listen, ListenError};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tonic::Code;

use crate::kit::*;

const SERVING: i32 = HealthCheckResponse::SERVING;
const NOT_SERVING: i32 = HealthCheckResponse::NOT_SERVING;
const PROCESSOR: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

#[tokio::test]
async fn health_answers_for_its_four_names_and_no_other() {
    let picker = Picker::start(two(), LIMITS).await;
    let connection = picker.connect().await;
    for (is_ready, expected) in [(false, NOT_SERVING), (true, SERVING), (false, NOT_SERVING)] {
        picker.health.set_ready(is_ready);
        for name in ["", "readiness", PROCESSOR] {
            assert_eq!(connection.health(name).await, Ok(expected), "{name:?}");
        }
        assert_eq!(connection.health("liveness").await, Ok(SERVING));
        assert_eq!(connection.health("readyness").await, Err(Code::NotFound));
    }
}

#[tokio::test]
async fn a_watch_of_health_tells_each_change() {
    let picker = Picker::start(two(), LIMITS).await;
    let connection = picker.connect().await;
    let mut watch = connection.watch_health("readiness").await;
    let mut unknown = connection.watch_health("readyness").await;
    assert_eq!(told(&mut unknown).await, HealthCheckResponse::SERVICE_UNKNOWN);
    assert_eq!(told(&mut watch).await, NOT_SERVING);
    picker.health.set_ready(true);
    assert_eq!(told(&mut watch).await, SERVING);
    picker.health.set_ready(true); // no change
    picker.health.end();
    assert_eq!(told(&mut watch).await, NOT_SERVING);
    picker.health.set_ready(true);
    assert!(!picker.health.is_serving(), "a picker that ends is never ready again");
}

async fn told(watch: &mut tonic::Streaming<HealthCheckResponse>) -> i32 {
    let next = tokio::time::timeout(PATIENCE, watch.message()).await.expect("a status in time");
    next.expect("no error").expect("no end").status
}

#[tokio::test]
async fn a_picker_that_is_told_to_end_lets_answers_under_way_pass() {
    let picker = Picker::start(two(), LIMITS).await;
    let address = picker.address.expect("a TCP picker");
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    stream.chosen().await;
    let health = picker.health.clone();
    health.set_ready(true);
    let mut task = picker.end();
    stream.send(response_headers(&[(":status", "200")], false)).await;
    stream.answer().await;
    for _ in 0..3 {
        stream.send(response_body("data: 1\n\n", false)).await;
        assert!(matches!(stream.answer().await, ResponsePart::ResponseBody(_)));
    }
    assert!(!health.is_serving());
    assert!(TcpStream::connect(address).await.is_err(), "nothing new is accepted");
    assert!(!task.is_finished(), "an answer is under way");
    stream.send(response_body("", true)).await;
    stream.answer().await;
    stream.half_close().await;
    stream.is_over().await;
    drop(stream);
    let ended = tokio::time::timeout(PATIENCE, &mut task).await;
    assert!(ended.is_ok_and(|ended| ended.is_ok()), "the picker ends with its last answer");
}

#[tokio::test]
async fn a_unix_socket_serves_and_a_dead_process_leaves_no_hindrance() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("epp.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bound")); // leaves the file behind
    let listen = Listen::Unix(path.clone());
    let picker = Picker::start_at(&listen, None, two(), LIMITS).await;
    let mut stream = Connection::over_unix(&path).await.stream().await;
    stream.send(opening(&CHAT, true)).await;
    stream.chosen().await;
    let taken = EppServer::bind(&listen, None).await.err();
    assert!(matches!(taken, Some(ListenError::Taken(_))), "{taken:?}");
    drop(stream);
    let task = picker.end();
    assert!(tokio::time::timeout(PATIENCE, task).await.is_ok_and(|ended| ended.is_ok()));
    assert!(!path.exists());
}

#[tokio::test]
async fn a_file_that_is_no_socket_is_not_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "dear diary").expect("written");
    assert!(EppServer::bind(&Listen::Unix(path.clone()), None).await.is_err());
    assert_eq!(std::fs::read(&path).expect("read"), b"dear diary");
}

#[tokio::test]
async fn tls_serves_with_a_self_signed_certificate() {
    let listen = Listen::Tcp(address("127.0.0.1:0"));
    let picker = Picker::start_at(&listen, Some(Certificate::SelfSigned), two(), LIMITS).await;
    let (connection, _) = over_tls(&picker).await;
    let mut stream = connection.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body("{}", true)).await;
    stream.chosen().await;
    assert_eq!(stream.request_body().await, (b"{}".to_vec(), 1, false));
}

#[tokio::test]
async fn tls_serves_with_certificates_from_files_and_takes_new_ones() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = write_certificate(folder.path());
    let certificate =
        Certificate::Files { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let listen = Listen::Tcp(address("127.0.0.1:0"));
    let picker = Picker::start_at(&listen, Some(certificate), two(), LIMITS).await;
    assert_eq!(over_tls(&picker).await.1, first);
    let second = write_certificate(folder.path());
    assert_ne!(first, second);
    let changed = async {
        while over_tls(&picker).await.1 != second {
            tokio::time::sleep(STILLNESS).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, changed).await.is_ok(), "the new certificate is not used");
}

#[tokio::test]
async fn certificates_that_cannot_be_used_say_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let source = Certificate::Files { certificate: certificate.clone(), key: key.clone() };
    let listen = Listen::Tcp(address("127.0.0.1:0"));
    let refusal = async || match EppServer::bind(&listen, Some(source.clone())).await.err() {
        Some(ListenError::Certificate(error)) => error,
        other => panic!("no refusal of the certificate: {other:?}"),
    };
    assert!(matches!(refusal().await, CertificateError::Read { .. }));
    write_certificate(folder.path());
    std::fs::write(&key, "no key").expect("written");
    assert!(matches!(refusal().await, CertificateError::Pem { wanted: "private key", .. }));
    write_certificate(folder.path());
    std::fs::write(&certificate, "").expect("written");
    let error = refusal().await;
    assert!(matches!(error, CertificateError::Unusable(_)), "{error:?}");
}

/// Writes a new certificate and its key; returns the certificate.
fn write_certificate(folder: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(["epp".to_owned()]).expect("a certificate");
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).expect("written");
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).expect("written");
    made.cert.der().clone()
}

/// A connection as Envoy's, which verifies nothing unless told to; and the certificate that it saw.
async fn over_tls(picker: &Picker) -> (Connection, CertificateDer<'static>) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(VerifiesNothing))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(picker.address.expect("a TCP picker")).await.expect("the picker accepts");
    let name = ServerName::try_from("epp").expect("a name");
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.expect("TLS");
    let certificate = stream.get_ref().1.peer_certificates().expect("a certificate")[0].clone();
    (Connection::over(stream).await, certificate)
}

#[derive(Debug)]
struct VerifiesNothing;

impl ServerCertVerifier for VerifiesNothing {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
