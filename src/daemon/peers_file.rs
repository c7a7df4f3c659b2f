//! The file with the addresses of other routers. The daemon reads it again and again; it is small.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;

use super::desired_fleet::DesiredFleet;
use super::routers_thread::NamedPeers;
use super::worker_files;
use crate::endpoint::Endpoint;
use crate::limits::{DISCOVERY_READ_MS_MAX, ROUTER_FILE_EVERY_MS, ROUTER_PEERS_MAX};

/// Follows the file for ever. While it cannot be used, the peers that it listed last stay.
pub(super) async fn run(path: &Path, peers: &NamedPeers, desired: &DesiredFleet) {
    let name = format!("the file of routers {}", path.display());
    let (mut known, mut late) = (None, None);
    loop {
        match read(path, &mut late).await {
            Ok(listed) => {
                desired.note(&name, None);
                if known.as_ref() != Some(&listed) {
                    tracing::info!(path = %path.display(), peers = listed.len(), "the file of other routers lists others than before");
                    peers.set_filed(listed.clone());
                    known = Some(listed);
                }
            }
            Err(problem) => {
                if desired.note(&name, Some(format!("{problem}; the peers that it listed before stay"))) {
                    tracing::error!(path = %path.display(), problem, "the file of other routers cannot be used");
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(ROUTER_FILE_EVERY_MS)).await;
    }
}

type Reading = JoinHandle<std::io::Result<Vec<u8>>>;

/// Reads the file on a thread beside this one, as its file system may not respond. A reading that is `late` goes on, and
/// is the next one.
async fn read(path: &Path, late: &mut Option<Reading>) -> Result<Vec<Endpoint>, String> {
    let at: PathBuf = path.to_owned();
    let mut reading = late.take().unwrap_or_else(|| tokio::task::spawn_blocking(move || worker_files::read(&at)));
    match tokio::time::timeout(Duration::from_millis(DISCOVERY_READ_MS_MAX), &mut reading).await {
        Ok(Ok(Ok(bytes))) => parse(&bytes),
        Ok(Ok(Err(error))) => Err(format!("cannot be read: {error}")),
        Ok(Err(error)) => Err(format!("reading it panicked: {error}")),
        Err(_) => {
            *late = Some(reading);
            Err("reading it takes too long; check whether its file system responds".to_owned())
        }
    }
}

/// The addresses of a file, in order, each once.
///
/// # Errors
/// The line that is none, or that there are too many: then none of them is used.
fn parse(bytes: &[u8]) -> Result<Vec<Endpoint>, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("is not UTF-8: {error}"))?;
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let address = |(at, line): (usize, &str)| {
        // The fault repeats the line, which may have any length.
        let shown = |fault: String| fault.chars().take(FAULT_CHARS_MAX).collect::<String>();
        Endpoint::parse(line).map_err(|fault| format!("line {}: {}", at + 1, shown(fault.to_string())))
    };
    let mut listed = lines.map(address).collect::<Result<Vec<Endpoint>, String>>()?;
    listed.sort_unstable();
    listed.dedup();
    match listed.len() {
        0..=ROUTER_PEERS_MAX => Ok(listed),
        many => Err(format!("lists {many} routers, and {ROUTER_PEERS_MAX} are the most")),
    }
}

/// What is shown of what is wrong with a line.
const FAULT_CHARS_MAX: usize = 120;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_listed_once_and_one_bad_line_refuses_all() {
        let listed =
            parse(b"# routers\n\ntcp://10.0.0.2:5571\r\n  tcp://10.0.0.1:5571\ntcp://10.0.0.2:5571").expect("a list");
        let listed: Vec<String> = listed.iter().map(ToString::to_string).collect();
        assert_eq!(listed, ["tcp://10.0.0.1:5571", "tcp://10.0.0.2:5571"]);
        assert_eq!(parse(b"").map(|listed| listed.len()), Ok(0));
        let refused = |bytes: &[u8]| parse(bytes).expect_err("refused");
        assert!(refused(b"tcp://a:1\nno address\n").starts_with("line 2: "));
        assert!(refused(&[b'x'; 1000]).len() < 200);
        assert!(refused(&[0xff]).contains("UTF-8"));
        let many: String = (0..=ROUTER_PEERS_MAX).map(|port| format!("tcp://a:{}\n", port + 1)).collect();
        assert!(refused(many.as_bytes()).contains("65 routers"));
    }
}
