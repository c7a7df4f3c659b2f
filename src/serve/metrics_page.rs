//! `/metrics`: one page for all scrapes that wait for it, made and served by a thread of its own.
//!
//! ```text
//! metrics port ─┐
//!               ├─▶ MetricsPages ─ requests ─▶ thread: PageMaker ─ page by reference ─▶ every waiting scrape
//! HTTP port ────┘
//! ```
//!
//! A page of a large fleet takes long to make and megabytes to hold. So scrapes that come together share one, and a
//! page is served for a while before the next is made. The number of pages in memory is bounded, however slowly they
//! are read.
//!
//! The port is off unless it is configured, and on the loopback interface unless the configuration names another address.
//! Every user of the machine can reach it, also those that may not use the sockets. So its connections are few and short.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};

use super::http::browser_guard;
use super::http::connections::{ConnectionLimits, TimeLimits, serve};
use super::http::port_thread::{self, PortThread};
use super::listening::ListeningSockets;
use super::turns::Turns;
use crate::budget::Gauge;
use crate::error::Result;
use crate::limits::{
    METRICS_CONNECTION_MS_MAX, METRICS_CONNECTIONS_MAX, METRICS_PAGE_KEPT_MS, METRICS_PAGE_MS_MIN,
    METRICS_PAGE_REUSE_FACTOR, METRICS_PAGES_MAX, METRICS_SCRAPES_WAITING_MAX,
};
use crate::metrics::{CounterSet, PageCounter};
use crate::sandbox::ThreadKind;
use crate::watchdog::{Activity, ThreadMark};

/// The content type of OpenMetrics text.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The retry time for a scrape without a page, seconds.
const RETRY_AFTER_S: &str = "1";

/// What a page has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageForm {
    /// Values alone, as every scraper reads them.
    Plain,
    /// Exemplars, too, as OpenMetrics has them.
    WithExemplars,
}

impl PageForm {
    /// What a scraper with these headers reads: exemplars only if it accepts OpenMetrics.
    pub(super) fn accepted(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
        match accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text")) {
            true => Self::WithExemplars,
            false => Self::Plain,
        }
    }
}

/// The port's name in errors.
const PORT: &str = "metrics port";

/// The metrics port, bound.
#[derive(Debug)]
pub struct MetricsPort {
    listener: std::net::TcpListener,
    turns: Turns,
    hosts: Vec<String>,
}

impl MetricsPort {
    /// Binds an address, if there is one. The port also answers to the names in `hosts`.
    ///
    /// # Errors
    /// [`Kind::System`](crate::error::Kind::System) if the port is taken or may not be bound.
    pub fn bind(address: Option<SocketAddr>, hosts: &[String], sockets: &mut ListeningSockets) -> Result<Option<Self>> {
        let Some(address) = address else { return Ok(None) };
        let listener =
            sockets.tcp(address, PORT, "choose another metrics.port, or a metrics.listen of this machine")?;
        Ok(Some(Self { listener, turns: sockets.turns().clone(), hosts: hosts.to_vec() }))
    }
}

/// The thread that makes pages and serves the metrics port, if there is one.
#[derive(Debug)]
pub struct MetricsThread {
    thread: PortThread,
    pages: MetricsPages,
}

impl MetricsThread {
    /// Starts it. `render` appends a page of a form to the text. All pages together take at most `bytes_max`, unless one alone takes
    /// more; `held` shows what they take.
    ///
    /// # Errors
    /// [`Kind::System`](crate::error::Kind::System) if the thread or its runtime cannot be started.
    pub fn start(
        port: Option<MetricsPort>,
        (counters, mark): (Arc<CounterSet<PageCounter>>, Arc<ThreadMark>),
        (bytes_max, held): (u64, Gauge),
        render: impl Fn(PageForm, &mut String) -> fmt::Result + Send + 'static,
    ) -> Result<Self> {
        let (ask, asked) = mpsc::channel(METRICS_SCRAPES_WAITING_MAX);
        let pages = MetricsPages { ask, counters: Arc::clone(&counters) };
        let maker = PageMaker { render, newest: [None, None], alive: Arc::default(), bytes_max, held, counters };
        let scraped = pages.clone();
        let of_tasks = Arc::clone(&mark);
        let named = ("kvrouted-metrics", ThreadKind::MetricsPage);
        // Without a port of its own the thread makes pages at once.
        let turns = port.as_ref().map(|port| port.turns.clone()).unwrap_or_default();
        let thread = PortThread::start(named, (PORT, &turns), (mark, Activity::ServingMetrics), move |ending| {
            let listen = |port: MetricsPort| -> Result<Listening> {
                Ok((port_thread::register(port.listener, PORT)?, port.hosts))
            };
            Ok(run((port.map(listen).transpose()?, of_tasks), maker, asked, scraped, ending))
        })?;
        Ok(Self { thread, pages })
    }

    /// The source of pages for other ports.
    #[must_use]
    pub fn pages(&self) -> &MetricsPages {
        &self.pages
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.is_running()
    }

    /// Ends it. A page that is being read is cut after a moment.
    ///
    /// # Errors
    /// [`Kind::Internal`](crate::error::Kind::Internal) if it panicked.
    pub fn stop(self) -> Result<()> {
        self.thread.stop()
    }
}

/// The port in its runtime, and its names.
type Listening = (tokio::net::TcpListener, Vec<String>);

async fn run<R: Fn(PageForm, &mut String) -> fmt::Result>(
    (port, mark): (Option<Listening>, Arc<ThreadMark>),
    mut maker: PageMaker<R>,
    mut asked: mpsc::Receiver<Scrape>,
    pages: MetricsPages,
    mut ending: watch::Receiver<bool>,
) {
    let until_told = ending.clone();
    let serving = async {
        match port {
            Some((listener, hosts)) => {
                let whole = Some(Duration::from_millis(METRICS_CONNECTION_MS_MAX));
                let limits = ConnectionLimits {
                    times: TimeLimits { whole, ..TimeLimits::default() },
                    connections_max: METRICS_CONNECTIONS_MAX,
                    reserved: (0, Router::new()),
                };
                serve(listener, router(pages, hosts), limits, (Arc::default(), mark), until_told).await;
            }
            None => drop(ending.wait_for(|ending| *ending).await),
        }
    };
    tokio::select! {
        () = serving => {}
        () = maker.serve(&mut asked) => {}
    }
}

fn router(pages: MetricsPages, hosts: Vec<String>) -> Router {
    let guarded = Arc::new((pages.clone(), hosts));
    Router::new()
        .route(
            "/metrics",
            get(|State(pages): State<MetricsPages>, headers: HeaderMap| async move {
                pages.response(PageForm::accepted(&headers)).await
            }),
        )
        .layer(from_fn_with_state(guarded, refuse))
        .with_state(pages)
}

/// Refuses web pages, and unknown host names.
async fn refuse(State(port): State<Arc<(MetricsPages, Vec<String>)>>, request: Request, next: Next) -> Response {
    let (pages, hosts) = &*port;
    match browser_guard::refusal(&request, hosts, "metrics") {
        None => next.run(request).await,
        Some(refused) => {
            pages.counters.bump(PageCounter::ScrapesRefused);
            refused
        }
    }
}

/// A scrape that waits for a page of a form.
type Scrape = (PageForm, oneshot::Sender<Page>);

/// The answer to a scrape.
#[derive(Clone, Debug)]
enum Page {
    Text(Bytes),
    /// The pages that are being read are as many as the limit.
    TooManyReaders,
    /// The page could not be written.
    Failed,
}

/// The source of metrics pages, for any thread.
#[derive(Clone, Debug)]
pub struct MetricsPages {
    ask: mpsc::Sender<Scrape>,
    counters: Arc<CounterSet<PageCounter>>,
}

impl MetricsPages {
    /// The response to a scrape, once there is a page. The calling thread makes none.
    pub(super) async fn response(&self, form: PageForm) -> Response {
        self.counters.bump(PageCounter::Scrapes);
        let (send, page) = oneshot::channel();
        let page = match self.ask.try_send((form, send)) {
            Ok(()) => page.await.unwrap_or(Page::Failed),
            Err(mpsc::error::TrySendError::Full(_)) => Page::TooManyReaders,
            Err(mpsc::error::TrySendError::Closed(_)) => Page::Failed,
        };
        match page {
            Page::Text(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
            Page::TooManyReaders => {
                self.counters.bump(PageCounter::ScrapesCrowded);
                (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, RETRY_AFTER_S)]).into_response()
            }
            Page::Failed => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

/// The text of a page, counted while it is being read.
struct Counted {
    text: String,
    alive: Arc<AtomicUsize>,
    held: Gauge,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Relaxed, as the load in `PageMaker::page`: only the number matters, and the text is reached by reference.
        self.alive.fetch_sub(1, Ordering::Relaxed);
        self.held.subtract(self.text.capacity() as u64);
    }
}

/// Makes pages.
struct PageMaker<R> {
    render: R,
    /// By form: the last page, and the time until which it is served without making another.
    newest: [Option<(Bytes, Instant)>; 2],
    alive: Arc<AtomicUsize>,
    bytes_max: u64,
    held: Gauge,
    counters: Arc<CounterSet<PageCounter>>,
}

impl<R: Fn(PageForm, &mut String) -> fmt::Result> PageMaker<R> {
    /// Answers every scrape, for ever.
    async fn serve(&mut self, asked: &mut mpsc::Receiver<Scrape>) {
        loop {
            let kept = Duration::from_millis(METRICS_PAGE_KEPT_MS);
            let next = match self.newest.iter().any(Option::is_some) {
                true => tokio::time::timeout(kept, asked.recv()).await,
                false => Ok(asked.recv().await),
            };
            match next {
                Ok(Some(first)) => {
                    let mut waiting = vec![first];
                    while let Ok(other) = asked.try_recv() {
                        waiting.push(other);
                    }
                    for form in [PageForm::Plain, PageForm::WithExemplars] {
                        let mut of_form = waiting.extract_if(.., |(wanted, _)| *wanted == form).peekable();
                        if of_form.peek().is_some() {
                            let page = self.page(form);
                            // A scrape may have gone.
                            of_form.for_each(|(_, scrape)| drop(scrape.send(page.clone())));
                        }
                    }
                }
                // The senders go with their ports.
                Ok(None) => return,
                Err(_) => self.newest = [None, None],
            }
            // The port's connections are served in between, whatever the number of scrapes.
            tokio::task::yield_now().await;
        }
    }

    /// The page for all scrapes that wait now for one of this form.
    fn page(&mut self, form: PageForm) -> Page {
        let began = Instant::now();
        let newest = &mut self.newest[form as usize];
        if let Some((text, until)) = newest
            && began < *until
        {
            return Page::Text(text.clone());
        }
        // Relaxed: see `Counted`. Only this thread adds.
        let alive = self.alive.load(Ordering::Relaxed);
        // The next page is about as long as the last.
        let last_bytes = newest.as_ref().map_or(0, |(text, _)| text.len() as u64);
        if alive >= METRICS_PAGES_MAX || (alive > 0 && self.held.get() + last_bytes > self.bytes_max) {
            match newest.take() {
                // It is being read, like all older pages. It stays the last one until one of them ends.
                Some((text, until)) if !text.is_unique() => {
                    *newest = Some((text.clone(), until));
                    self.counters.bump(PageCounter::PagesStale);
                    return Page::Text(text);
                }
                Some(_) => {}
                None => return Page::TooManyReaders,
            }
        }
        // Growing means copying.
        let mut text = String::with_capacity((last_bytes + last_bytes / 8) as usize);
        if (self.render)(form, &mut text).is_err() {
            return Page::Failed;
        }
        self.counters.bump(PageCounter::Pages);
        self.alive.fetch_add(1, Ordering::Relaxed);
        text.shrink_to_fit();
        self.held.add(text.capacity() as u64);
        let text = Bytes::from_owner(Counted { text, alive: Arc::clone(&self.alive), held: self.held.clone() });
        let served = (began.elapsed() * METRICS_PAGE_REUSE_FACTOR).max(Duration::from_millis(METRICS_PAGE_MS_MIN));
        *newest = Some((text.clone(), Instant::now() + served));
        Page::Text(text)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc as std_mpsc;
    use std::thread;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    fn maker(
        render: impl Fn(PageForm, &mut String) -> fmt::Result,
    ) -> PageMaker<impl Fn(PageForm, &mut String) -> fmt::Result> {
        let (newest, alive, held, counters) = ([None, None], Arc::default(), Gauge::default(), Arc::default());
        PageMaker { render, newest, alive, bytes_max: u64::MAX, held, counters }
    }

    fn text(page: Page) -> Bytes {
        match page {
            Page::Text(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn pages_in_memory_are_bounded_and_the_newest_is_served_meanwhile() {
        let mut maker = maker(|_, text| {
            text.push('x');
            Ok(())
        });
        let mut held = Vec::new();
        for at in 0..2 * METRICS_PAGES_MAX {
            if let Some((_, until)) = &mut maker.newest[0] {
                *until = Instant::now();
            }
            held.push(text(maker.page(PageForm::Plain)));
            assert_eq!(maker.alive.load(Ordering::Relaxed), METRICS_PAGES_MAX.min(at + 1));
        }
        let counted = [PageCounter::Pages, PageCounter::PagesStale].map(|counter| maker.counters.get(counter));
        assert_eq!(counted, [METRICS_PAGES_MAX as u64; 2]);
        maker.newest = [None, None];
        assert!(matches!(maker.page(PageForm::Plain), Page::TooManyReaders));
        held.clear();
        assert_eq!(text(maker.page(PageForm::Plain)), "x");
        assert_eq!(maker.alive.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn pages_that_are_read_take_bounded_memory_and_one_alone_is_always_made() {
        let mut maker = maker(|_, text| {
            text.push_str(&"x".repeat(100));
            Ok(())
        });
        maker.bytes_max = 250;
        let mut held = Vec::new();
        for _ in 0..4 {
            if let Some((_, until)) = &mut maker.newest[0] {
                *until = Instant::now();
            }
            held.push(text(maker.page(PageForm::Plain)));
        }
        assert_eq!((maker.held.get(), maker.counters.get(PageCounter::PagesStale)), (200, 2));
        held.clear();
        (maker.newest, maker.bytes_max) = ([None, None], 10);
        assert_eq!((text(maker.page(PageForm::Plain)).len(), maker.held.get()), (100, 100));
    }

    #[test]
    fn only_who_accepts_openmetrics_gets_exemplars() {
        let form = |accept: &[&str]| {
            let mut headers = HeaderMap::new();
            for accept in accept {
                headers.append(header::ACCEPT, accept.parse().unwrap());
            }
            PageForm::accepted(&headers)
        };
        let of_prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(form(&[of_prometheus]), PageForm::WithExemplars);
        assert_eq!(form(&["text/plain", "application/openmetrics-text"]), PageForm::WithExemplars);
        for accept in [&[][..], &["text/plain;version=0.0.4"], &["*/*"]] {
            assert_eq!(form(accept), PageForm::Plain);
        }
        let mut maker = maker(|form, text| {
            text.push_str(if form == PageForm::Plain { "plain" } else { "exemplars" });
            Ok(())
        });
        for (form, page) in
            [(PageForm::Plain, "plain"), (PageForm::WithExemplars, "exemplars"), (PageForm::Plain, "plain")]
        {
            assert_eq!(text(maker.page(form)), page);
        }
        assert_eq!(maker.counters.get(PageCounter::Pages), 2, "each form is kept");
    }

    #[test]
    fn a_failed_render_is_no_page() {
        let mut maker = maker(|_, _| Err(fmt::Error));
        assert!(matches!(maker.page(PageForm::Plain), Page::Failed));
        assert_eq!(maker.alive.load(Ordering::Relaxed), 0);
    }

    /// Scrapes on a connection of its own, and reads to the end.
    async fn scrape(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).await.unwrap();
        page
    }

    #[tokio::test(flavor = "current_thread")]
    async fn sixty_scrapes_at_once_share_pages_and_do_not_block_the_thread_that_sends_them() {
        const SCRAPES: u64 = 60;
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let counters = Arc::<CounterSet<PageCounter>>::default();
        // This thread decides when the first page is done.
        let (release, released) = std_mpsc::channel::<()>();
        let (making, made) = std_mpsc::channel();
        let render = move |_: PageForm, text: &mut String| {
            making.send(thread::current().id()).unwrap();
            // Closed from the second page on.
            let _ = released.recv();
            text.push_str("# EOF\n");
            Ok(())
        };
        let port = MetricsPort { listener, turns: Turns::default(), hosts: Vec::new() };
        let mark = Arc::new(ThreadMark::new("metrics", false));
        let of_pages = (u64::MAX, Gauge::default());
        let thread = MetricsThread::start(Some(port), (Arc::clone(&counters), mark), of_pages, render).unwrap();
        // All but one scrape come as from the HTTP port, whose thread is this one.
        let pages = thread.pages().clone();
        let asking = |pages: MetricsPages| async move { pages.response(PageForm::Plain).await.status() };
        let asked: Vec<_> = (1..SCRAPES).map(|_| tokio::spawn(asking(pages.clone()))).collect();
        let scraped = tokio::spawn(scrape(address));
        let mut rounds = 0;
        let maker = loop {
            rounds += 1;
            tokio::task::yield_now().await;
            if rounds > 1000
                && counters.get(PageCounter::Scrapes) >= SCRAPES - 1
                && let Ok(maker) = made.try_recv()
            {
                break maker;
            }
        };
        assert_ne!(maker, thread::current().id(), "this thread ran {rounds} times while another made a page");
        drop(release);
        for asked in asked {
            assert_eq!(asked.await.unwrap(), StatusCode::OK);
        }
        let page = scraped.await.unwrap();
        assert!(page.starts_with("HTTP/1.0 200 OK\r\n") && page.ends_with("# EOF\n"), "{page}");
        assert_eq!(counters.get(PageCounter::Scrapes), SCRAPES);
        // One page, or a few where the machine stops for longer than a page is served.
        assert!(counters.get(PageCounter::Pages) <= 3, "{} pages", counters.get(PageCounter::Pages));
        thread.stop().unwrap();
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_silent_connection_gives_its_place_to_one_that_scrapes() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(address.ip().is_loopback());
        let port = MetricsPort { listener, turns: Turns::default(), hosts: Vec::new() };
        let render = |_: PageForm, text: &mut String| fmt::Write::write_str(text, "# EOF\n");
        let counted = (Arc::default(), Arc::new(ThreadMark::new("t", false)));
        let thread = MetricsThread::start(Some(port), counted, (u64::MAX, Gauge::default()), render).unwrap();
        let mut silent = Vec::new();
        for _ in 0..METRICS_CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /metrics HT").await.unwrap();
            silent.push(stream);
        }
        let page = scrape(address).await;
        assert!(page.starts_with("HTTP/1.0 200 OK\r\n") && page.ends_with("# EOF\n"), "{page}");
        thread.stop().unwrap();
    }
}
