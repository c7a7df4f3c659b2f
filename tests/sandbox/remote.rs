//! A daemon with a remote port, and a caller of it, each in its sandbox.

use crate::kernel_has_all;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::raw::Raw;
use crate::kit::remote::{Site, WEST, replace_token};
use crate::kit::until;

#[test]
fn a_remote_port_and_its_caller_do_all_their_work_inside() {
    const NEW: &str = "east-new-456789abcdef0123456789abcdef";
    if !kernel_has_all("a remote port and its caller in their sandboxes") {
        return;
    }
    let site = Site::new();
    site.configure("", "", "[sandbox]\nmode = \"required\"\n");
    let mut daemon = site.daemon();
    let metrics = free_port();
    let confined = ["--sandbox", "required", "--metrics-port", &metrics.to_string()];
    let mut east = site.caller("east", &confined);
    Raw::greeted(&east.socket).assert_served();
    // A name, which the caller has to look up, inside.
    let to = format!("localhost:{}", site.address.port());
    let west = site.caller("west", &["--sandbox", "required", "--to", &to]);
    Raw::greeted(&west.socket).assert_served();
    // Both read their files again, inside.
    site.write_principals(&format!("east {NEW}\nwest {WEST}\n"));
    replace_token(&site.path("east.token"), NEW);
    let reloads = daemon.counter("config_reloads");
    daemon.process.signal("-HUP");
    until("the principals are read", || daemon.counter("config_reloads") > reloads);
    east.process.signal("-HUP");
    until("the token is read", || east.process.log().contains("are read again"));
    Raw::greeted(&east.socket).assert_served();
    let (_, page) = scrape(metrics);
    assert!(page.contains("kvrouted_sandbox{part=\"filters\"} 1"), "{page}");
    assert_eq!((daemon.process.end("-TERM"), east.process.end("-TERM")), (Some(0), Some(0)));
    assert!(!east.socket.exists(), "its socket file is removed");
    for log in [daemon.process.log(), east.process.log(), west.process.log()] {
        assert!(!log.contains("refused a system call") && !log.contains("confined as the process is"), "{log}");
    }
}
