//! A metrics page as a scraper reads it, and the HTTP server of an engine.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

/// Head and text of the metrics page.
pub(crate) fn scrape(port: u16) -> (String, String) {
    get(port, "/metrics")
}

/// Head and body of an answer.
pub(crate) fn get(port: u16, path: &str) -> (String, String) {
    let mut page = TcpStream::connect(("127.0.0.1", port)).expect("the port");
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    page.write_all(request.as_bytes()).expect("asked");
    let mut body = String::new();
    page.read_to_string(&mut body).expect("answered");
    let (head, text) = body.split_once("\r\n\r\n").expect("a body");
    (head.to_owned(), text.to_owned())
}

/// An engine's HTTP server: it says where the engine publishes. It answers the first request with 503.
pub(crate) fn server(info: String) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for (asked, stream) in listener.incoming().enumerate() {
            let Ok(mut stream) = stream else { continue };
            let (mut request, mut byte) = (Vec::new(), [0_u8]);
            while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
                request.push(byte[0]);
            }
            assert!(request.starts_with(b"GET /server_info HTTP/1.1\r\n"), "{}", String::from_utf8_lossy(&request));
            let (status, body) = if asked == 0 { ("503 Not Yet", "{}") } else { ("200 OK", info.as_str()) };
            let length = body.len();
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            // The daemon may have gone.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    port
}
