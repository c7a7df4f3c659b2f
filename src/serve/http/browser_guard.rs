//! The browser guard: it refuses requests that a web page sends. A user who opens a page lets its author send requests
//! from the user's machine. Clients other than browsers send none of the headers that the guard looks for.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use super::reply::Refusal;
use crate::error::{Error, Kind};
use crate::metrics::HttpCounter;

/// The header in which a browser names the relation of a page to this port.
const FETCH_SITE: &str = "sec-fetch-site";

/// Refuses every request of a page.
pub(super) async fn refuse(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match refusal(&request, &app.hosts, "http") {
        None => next.run(request).await,
        Some(refused) => {
            app.counters.bump(HttpCounter::PagesRefused);
            refused
        }
    }
}

/// The refusal of a request that a page sent, or whose host is not in `hosts` of the configuration's `table`.
pub(in crate::serve) fn refusal(request: &Request, hosts: &[String], table: &str) -> Option<Response> {
    let (message, remedy) = if is_of_page(request.headers()) {
        let remedy = "ask from a program: no page may ask, of whatever origin";
        ("a web page sent the request".to_owned(), remedy.to_owned())
    } else if !is_host_ours(request.uri(), request.headers(), hosts) {
        (
            format!("the Host is neither an IP address nor localhost, and {table}.hosts does not name it"),
            format!("ask the port by its address, also behind a proxy, or name the host in hosts under [{table}]"),
        )
    } else {
        return None;
    };
    Some(Refusal::from(Error::new(Kind::NotPermitted, message, remedy)).into_response())
}

/// Whether a page caused the request. An address that the user typed or opened from a bookmark counts as no page.
fn is_of_page(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.get_all(FETCH_SITE).iter().any(|site| site != "none")
}

/// Whether the host is an address or `localhost`, which no name server resolved, or one of `hosts`. Otherwise the
/// author of a page could let the name of the page's host resolve to this machine. The page's requests would then reach
/// this port as if it were the page's own server, without an origin.
fn is_host_ours(uri: &Uri, headers: &HeaderMap, hosts: &[String]) -> bool {
    let is_ours = |authority: &Authority| {
        let host = authority.host();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // A name may end with the dot of the DNS root.
        let name = host.strip_suffix('.').unwrap_or(host);
        name.eq_ignore_ascii_case("localhost")
            || address.parse::<IpAddr>().is_ok()
            || hosts.iter().any(|host| host == "*" || host.eq_ignore_ascii_case(name))
    };
    let mut named = headers.get_all(header::HOST).iter();
    uri.authority().is_none_or(is_ours)
        && named.all(|host| Authority::try_from(host.as_bytes()).is_ok_and(|authority| is_ours(&authority)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_request_with_an_origin_or_a_site_is_of_a_page() {
        for (line, expected) in [
            (("origin", "http://127.0.0.1:8090"), true),
            (("origin", "null"), true),
            (("sec-fetch-site", "cross-site"), true),
            (("sec-fetch-site", "same-origin"), true),
            (("sec-fetch-site", "none"), false),
            (("user-agent", "curl"), false),
        ] {
            assert_eq!(is_of_page(&headers(&[line])), expected, "{line:?}");
        }
    }

    #[test]
    fn a_host_name_is_refused_unless_it_is_configured() {
        let uri = |text: &'static str| Uri::from_static(text);
        let asked =
            |host: &'static str, hosts: &[String]| is_host_ours(&uri("/dump"), &headers(&[("host", host)]), hosts);
        for plain in ["127.0.0.1:8090", "127.0.0.1", "[::1]:8090", "localhost:8090", "LocalHost", "10.0.0.7:1"] {
            assert!(asked(plain, &[]), "{plain}");
        }
        let names = ["evil.example:8090", "localhost.evil.example", "127.0.0.1.nip.example", "x", "", "[::1"];
        let configured = ["router.example".to_owned()];
        for name in names {
            assert!(!asked(name, &[]) && !asked(name, &configured), "{name}");
        }
        for ours in ["router.example", "ROUTER.example:80", "router.example.", "127.0.0.1"] {
            assert!(asked(ours, &configured), "{ours}");
        }
        assert!(!asked("sub.router.example", &configured));
        assert!(asked("evil.example", &["*".to_owned()]), "a proxy checks it");
        assert!(is_host_ours(&uri("/dump"), &headers(&[]), &[]), "browsers never leave it out");
        assert!(!is_host_ours(&uri("http://evil.example/dump"), &headers(&[("host", "localhost")]), &[]));
    }
}
