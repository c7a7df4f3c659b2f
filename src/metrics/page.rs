//! What is counted of the metrics page.

use super::CounterName;

counters! {
    /// Once per process, whichever port was asked.
    PageCounter {
        Scrapes = "metrics_scrapes", "Requests for the metrics page.";
        Pages = "metrics_pages", "Metrics pages made. Scrapes that come together share one.";
        PagesStale = "metrics_pages_stale", "Times the last metrics page was served once more because slow readers held as many pages as there may be.";
        ScrapesCrowded = "metrics_scrapes_crowded", "Requests for the metrics page refused because too many waited, or slow readers held all pages.";
        ScrapesRefused = "metrics_scrapes_refused", "Requests to the metrics port refused because a web page sent them, or because metrics.hosts does not name their Host.";
    }
}
