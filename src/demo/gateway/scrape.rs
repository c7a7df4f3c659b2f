//! What the daemon says of its own decisions on `/metrics`.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// How long connecting, and each read or write, may take.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Largest response read, in bytes.
const RESPONSE_BYTES_MAX: u64 = 16 << 20;

/// The daemon's decisions so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Decisions {
    /// Time spent on them, in seconds.
    seconds_sum: f64,
    /// How many there were.
    count: f64,
}

impl Decisions {
    /// Asks the daemon that serves metrics on `port` of the loopback interface. `None` if it cannot be read:
    /// the demo then shows that the number is not known.
    pub(super) fn read(port: u16) -> Option<Self> {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), TIMEOUT).ok()?;
        stream.set_read_timeout(Some(TIMEOUT)).ok()?;
        stream.set_write_timeout(Some(TIMEOUT)).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut response = String::new();
        stream.take(RESPONSE_BYTES_MAX).read_to_string(&mut response).ok()?;
        Self::parse(&response)
    }

    /// Picks the sums out of an HTTP response with the Prometheus text format in it.
    fn parse(response: &str) -> Option<Self> {
        let (head, body) = response.split_once("\r\n\r\n")?;
        if head.split(' ').nth(1) != Some("200") {
            return None;
        }
        let value = |name: &str| body.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        Some(Self {
            seconds_sum: value("kvrouted_decision_seconds_sum ")?,
            count: value("kvrouted_decision_seconds_count ")?,
        })
    }

    /// Mean time of the decisions made since `before`, in microseconds; `None` if there were none.
    pub(super) fn mean_us_since(self, before: Self) -> Option<f64> {
        let count = self.count - before.count;
        (count > 0.0).then(|| (self.seconds_sum - before.seconds_sum) * 1e6 / count)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const BODY: &str = "# TYPE kvrouted_decision_seconds histogram\n\
                        kvrouted_decision_seconds_sum 0.006\n\
                        kvrouted_decision_seconds_count 1200\n\
                        kvrouted_decision_seconds_bucket{le=\"0.1\"} 1200\n# EOF\n";

    fn response(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[test]
    fn the_mean_is_of_what_came_since() {
        let after = Decisions::parse(&response("200 OK", BODY)).unwrap();
        let before = Decisions { seconds_sum: 0.002, count: 200.0 };
        assert!((after.mean_us_since(before).unwrap() - 4.0).abs() < 1e-9);
        assert_eq!(after.mean_us_since(after), None);
    }

    #[test]
    fn what_does_not_say_it_is_not_known() {
        assert_eq!(Decisions::parse(&response("503 Service Unavailable", BODY)), None);
        assert_eq!(Decisions::parse(&response("200 OK", "kvrouted_decision_seconds_sum 0.1\n")), None);
        assert_eq!(Decisions::parse("HTTP/1.1 200 OK\r\n"), None);
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        assert_eq!(Decisions::read(free), None, "nobody listens");
    }

    #[test]
    fn it_is_read_over_a_socket() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(response("200 OK", BODY).as_bytes()).unwrap();
            String::from_utf8(request).unwrap()
        });
        assert_eq!(Decisions::read(port), Some(Decisions { seconds_sum: 0.006, count: 1200.0 }));
        assert!(served.join().unwrap().starts_with("GET /metrics HTTP/1.1\r\n"));
    }
}
