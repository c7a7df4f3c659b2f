//! A metrics page, read as a scraper reads it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

/// A port of the loopback interface that nobody listens on.
pub(crate) fn free_port() -> u16 {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    free.local_addr().expect("an address").port()
}

/// Head and text of the metrics page.
pub(crate) fn scrape(port: u16) -> (String, String) {
    let mut page = TcpStream::connect(("127.0.0.1", port)).expect("the page");
    page.write_all(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").expect("asked");
    let mut body = String::new();
    page.read_to_string(&mut body).expect("answered");
    let (head, text) = body.split_once("\r\n\r\n").expect("a body");
    (head.to_owned(), text.to_owned())
}
