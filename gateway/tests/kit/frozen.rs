//! The list of the gateway's metrics, on which dashboards and alerts rely: `tests/fixtures/frozen/gateway-metrics.txt`.

use std::collections::{BTreeMap, BTreeSet};

/// Names and lines of the list.
pub(crate) fn frozen_metrics() -> BTreeMap<String, String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/frozen/gateway-metrics.txt");
    let text = std::fs::read_to_string(path).expect("the list");
    let name = |line: &str| line.split(' ').nth(1).expect("a name").to_owned();
    text.lines().map(|line| (name(line), line.to_owned())).collect()
}

/// Compares the metrics of a page with the list, and gives their names. A metric without samples shows no labels.
pub(crate) fn compare_metrics(page: &str) -> BTreeSet<String> {
    let frozen = frozen_metrics();
    let mut found: BTreeMap<&str, (&str, BTreeSet<&str>)> = BTreeMap::new();
    for (name, kind) in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')) {
        found.insert(name, (kind, BTreeSet::new()));
    }
    let mut sampled = BTreeSet::new();
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let sample = line.split(['{', ' ']).next().expect("a name");
        let name = ["", "_total", "_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| sample.strip_suffix(end).filter(|name| found.contains_key(name)))
            .unwrap_or_else(|| panic!("a sample of no metric: {line}"));
        // No value of a label holds a comma or an equals sign.
        let labels = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
        let labels = labels.split(',').filter_map(|label| Some(label.split_once('=')?.0));
        found.get_mut(name).expect("just found").1.extend(labels);
        sampled.insert(name);
    }
    for (name, (kind, labels)) in &found {
        let labels: Vec<&str> = labels.iter().copied().collect();
        let line = format!("gateway {name} {kind} {{{}}}", labels.join(","));
        let listed =
            frozen.get(*name).unwrap_or_else(|| panic!("tests/fixtures/frozen/gateway-metrics.txt lacks {line}"));
        let is_equal =
            if sampled.contains(name) { *listed == line } else { listed.starts_with(&line[..line.len() - 2]) };
        assert!(is_equal, "tests/fixtures/frozen/gateway-metrics.txt has {listed}, the page {line}");
    }
    found.into_keys().map(str::to_owned).collect()
}
