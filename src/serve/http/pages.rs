//! Web pages: whoever looks at one lets its author send requests from this machine, so none of them is answered. What
//! is no browser says nothing of where a request comes from, and is.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::refusal::Refusal;
use crate::error::{Error, Kind};
use crate::metrics::HttpCounter;

/// Where a browser says that a request comes from.
const FETCH_SITE: &str = "sec-fetch-site";

/// Refuses what a page sends, whatever is asked.
pub(super) async fn refuse(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match refusal(&request, &app.hosts, "http") {
        None => next.run(request).await,
        Some(refused) => {
            app.counters.bump(HttpCounter::PagesRefused);
            refused
        }
    }
}

/// The refusal of a request that a page sent, or that names a host which is not in `hosts` of the configuration's `table`.
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

/// Whether a page caused it: what somebody typed into a browser, or opened from a bookmark, is of no page.
fn is_of_page(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.get_all(FETCH_SITE).iter().any(|site| site != "none")
}

/// Whether the host is named such that no name server was asked, or as `hosts` say. A page's author can have the name of
/// the page's own host mean this machine, after which the page asks here as if of its own server, and says no origin.
fn is_host_ours(uri: &Uri, headers: &HeaderMap, hosts: &[String]) -> bool {
    let is_ours = |authority: &Authority| {
        let host = authority.host();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // A name may be said with the root of all names behind it.
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
    fn who_names_an_origin_or_a_site_is_a_page() {
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
    fn a_host_that_is_a_name_may_be_anybodys_unless_it_is_configured() {
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
        assert!(asked("evil.example", &["*".to_owned()]), "somebody else checks it");
        assert!(is_host_ours(&uri("/dump"), &headers(&[]), &[]), "no browser leaves it out");
        assert!(!is_host_ours(&uri("http://evil.example/dump"), &headers(&[("host", "localhost")]), &[]));
    }
}
