//! Names that dashboards, configuration files and scripts use: metrics, fields and command-line options.
//! The lists are in `tests/fixtures/frozen`; the wire's are compared in `schemas.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use clap::CommandFactory as _;
use kvrouted::cli::Cli;
use kvrouted::config::{self, Flags};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

use crate::frozen_list::compare;
use crate::kit::engine::Publisher;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::remote::Site;
use crate::kit::{self, Daemon, Process, folder, prompt, text, until, until_ok};

// ---- metrics -----------------------------------------------------------------------------------------------

/// A batch in msgpack with one event of an unknown kind.
const BATCH_OF_AN_UNKNOWN_EVENT: &[u8] = b"\x92\xcb\0\0\0\0\0\0\0\0\x91\x91\xa7Unknown";

/// Type and label names of every metric of a page, by its name. The labels are those of all its samples.
fn metrics(page: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut found: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    for (name, kind) in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')) {
        assert!(found.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new())).is_none(), "{name} occurs twice");
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (sample, labels) = line.split_once('{').map_or((line, ""), |(sample, rest)| (sample, rest));
        let sample = sample.split(' ').next().expect("a name");
        let name = ["", "_total", "_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| sample.strip_suffix(suffix).filter(|name| found.contains_key(*name)))
            .unwrap_or_else(|| panic!("a sample of no metric: {line}"));
        let labels = labels.rsplit_once('}').map_or("", |(labels, _)| labels);
        // No label value of these tests holds a comma or an equals sign.
        let names = labels.split(',').filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
        found.get_mut(name).expect("just found").1.extend(names);
    }
    found
}

/// A line for each metric of a page: its name, type and labels.
fn metric_lines<'a>(source: &'a str, page: &str) -> impl Iterator<Item = String> + use<'a> {
    metrics(page).into_iter().map(move |(name, (kind, labels))| {
        let labels: Vec<String> = labels.into_iter().collect();
        format!("{source} {name} {kind} {{{}}}", labels.join(","))
    })
}

/// Waits until a page has samples of these metrics, and gives the page.
fn page_with(port: u16, samples: &[&str]) -> String {
    until_ok("every metric has a sample", || {
        let (_, page) = scrape(port);
        match samples.iter().find(|sample| !page.contains(&format!("\n{sample}"))) {
            Some(sample) => Err(format!("{sample} has none")),
            None => Ok(page),
        }
    })
}

/// The configuration of a daemon that has something to say by every metric with labels but
/// `kvrouted_worker_transfers_aborted`, which is listed without any: no dump or load is broken off here.
fn daemon_tables(port: u16, snapshots: &Path, publisher: &Publisher) -> String {
    format!(
        "approximate = true\n[metrics]\nport = {port}\n[shadow]\nshare = 1.0\npolicy = [\"mode=least-loaded\"]\n\
         [snapshot]\ndir = \"{}\"\n[[worker]]\nid = 1\nendpoint = \"{}\"\n[[worker]]\nid = 2\n",
        snapshots.display(),
        publisher.endpoint(),
    )
}

/// The page of a daemon whose one worker published what cannot be used, whose snapshot is broken, and which a caller from
/// another host uses; and the page of that caller.
fn daemon_and_caller_pages() -> (String, String) {
    let (site, port, callers_port) = (Site::new(), free_port(), free_port());
    let folder = Arc::clone(&site.folder);
    let snapshots = folder.path().join("snapshots");
    let mut publisher = Publisher::new();
    let tables = format!("{}{}", daemon_tables(port, &snapshots, &publisher), site.port_table());
    let config = kit::configure(folder.path(), &tables);
    let mut daemon = Daemon::serve(folder, &["--config", text(&config)]);
    publisher.await_subscription();
    publisher.store(&prompt(1, 640));
    until("the blocks are held", || daemon.worker_counter(0, "blocks_stored") > 0);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    break_files(&snapshots);

    let daemon = Daemon::serve(daemon.folder.clone(), &["--config", text(&config)]);
    publisher.await_subscription();
    publisher.send_payload(b"neither wire");
    publisher.send_payload(BATCH_OF_AN_UNKNOWN_EVENT);
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(2, 640);
    let book = Some(BookingRequest { request_id: "a", attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a decision");
    let caller = site.caller("east", &["--metrics-port", &callers_port.to_string()]);
    let _from_another_host = caller.client();
    let samples = [
        "kvrouted_finding{finding=\"undecodable\"",
        "kvrouted_remote_connections_open{",
        "kvrouted_shadow_decisions_total{",
        "kvrouted_snapshots_refused_total{",
        "kvrouted_worker_oddities_total{",
        "kvrouted_worker_predicted_blocks{",
        "kvrouted_worker_trust_reason{",
        "kvrouted_worker_undecodable_total{",
    ];
    (page_with(port, &samples), page_with(callers_port, &[]))
}

/// Flips a bit in the middle of every file of a folder.
fn break_files(folder: &Path) {
    let mut broken = 0;
    for entry in std::fs::read_dir(folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        let Ok(mut bytes) = std::fs::read(&path) else { continue };
        let middle = bytes.len() / 2;
        let Some(byte) = bytes.get_mut(middle) else { continue };
        *byte ^= 1;
        std::fs::write(&path, bytes).expect("written");
        broken += 1;
    }
    assert!(broken > 0, "the daemon wrote a snapshot");
}

/// The page of a relay whose engine published what cannot be used.
fn relay_page() -> String {
    let (folder, port) = (folder(), free_port());
    let mut publisher = Publisher::new();
    let endpoint = |name: &str| format!("ipc://{}/{name}", folder.path().display());
    let config = format!(
        "[relay]\nendpoint = \"{}\"\nreplay = \"{}\"\n[metrics]\nport = {port}\n[[space]]\nmodel = \"m\"\n\
         [[worker]]\nid = 1\nendpoint = \"{}\"\n",
        endpoint("events"),
        endpoint("replay"),
        publisher.endpoint(),
    );
    let file = folder.path().join("relay.toml");
    std::fs::write(&file, config).expect("written");
    let _relay = Process::start(folder.path(), "relay", &["relay", "--config", text(&file)]);
    publisher.await_subscription();
    publisher.send_payload(b"neither wire");
    publisher.send_payload(BATCH_OF_AN_UNKNOWN_EVENT);
    let samples =
        ["kvrouted_worker_oddities_total{", "kvrouted_worker_trust_reason{", "kvrouted_worker_undecodable_total{"];
    page_with(port, &samples)
}

#[test]
fn metrics_are_the_frozen_ones() {
    let ((daemon, caller), relay) = (daemon_and_caller_pages(), relay_page());
    let lines = metric_lines("serve", &daemon).chain(metric_lines("relay", &relay));
    compare("metrics.txt", &lines.chain(metric_lines("connect", &caller)).collect());
}

// ---- configuration -----------------------------------------------------------------------------------------

/// What is said of one field when a document sets it to `value`; nothing if the value is accepted.
fn refusal(section: &str, repeated: bool, field: &str, value: &str) -> Option<String> {
    let (header, path) = if repeated {
        (format!("[[{section}]]"), format!("{section}[0].{field}"))
    } else {
        (format!("[{section}]"), format!("{section}.{field}"))
    };
    let problems = config::parse("probe", &format!("{header}\n{field} = {value}\n"), &Flags::default()).err()?;
    problems.list.into_iter().find(|problem| problem.path == path).map(|problem| problem.message)
}

/// The bound that the example file leaves out: whether a text may be empty, and how long the entries of a list may be.
fn bound_of_texts(section: &str, repeated: bool, field: &str, value: &str) -> String {
    if value.starts_with('[') {
        let long = format!("[\"{}\"]", "x".repeat(1 << 20));
        let refused = refusal(section, repeated, field, &long).expect("an entry has a bound");
        return format!("; entries: {}", refused.split(", one has").next().expect("words"));
    }
    let is_text = value.starts_with('"');
    match is_text.then(|| refusal(section, repeated, field, "\"\"")).flatten() {
        Some(refused) => format!("; empty: {refused}"),
        None => String::new(),
    }
}

/// A line for each field of the example file: name, value, unit, bounds, and whether a reload takes a change over.
fn field_lines(example: &str) -> BTreeSet<String> {
    let (mut lines, mut section, mut repeated, mut facts) = (BTreeSet::new(), "", false, "");
    for line in example.lines() {
        if let Some(header) = line.strip_prefix('[') {
            repeated = header.starts_with('[');
            section = header.trim_matches(['[', ']']);
        } else if let Some((name, value)) = line.split_once(" = ").filter(|_| !facts.is_empty()) {
            // A commented field has no default; its value is an example.
            let (name, presence) = match (name.strip_prefix("# "), value.ends_with(" # required")) {
                (Some(name), _) => (name, "absent, as in"),
                (None, true) => (name, "required, as in"),
                (None, false) => (name, "default"),
            };
            let value = value.trim_end_matches(" # required");
            let bound = bound_of_texts(section, repeated, name, value);
            let table = if repeated { format!("[[{section}]]") } else { format!("[{section}]") };
            lines.insert(format!("{table} {name}: {presence} {value}; {}{bound}", facts.trim_end_matches('.')));
            facts = "";
        } else if let Some(comment) = line.strip_prefix("# ").filter(|comment| is_facts(comment)) {
            facts = comment;
        }
    }
    lines
}

fn is_facts(comment: &str) -> bool {
    comment.starts_with("Unit: ") || comment.starts_with("Values: ")
}

#[test]
fn configuration_fields_are_the_frozen_ones() {
    let example = config::example();
    let lines = field_lines(&example);
    assert_eq!(lines.len(), example.lines().filter(|line| line.contains("Values: ")).count(), "a line for each field");
    compare("configuration.txt", &lines);
}

// ---- the command line --------------------------------------------------------------------------------------

fn argument_line(command: &str, argument: &clap::Arg) -> String {
    let mut words = vec![command.to_owned()];
    match (argument.get_long(), argument.get_short()) {
        (Some(long), Some(short)) => words.push(format!("--{long} -{short}")),
        (Some(long), None) => words.push(format!("--{long}")),
        (None, Some(short)) => words.push(format!("-{short}")),
        (None, None) => words.push(format!("{}:", argument.get_index().expect("a place"))),
    }
    let takes_values = argument.get_action().takes_values();
    if takes_values {
        words.extend(argument.get_value_names().into_iter().flatten().map(|name| format!("<{name}>")));
        words.extend(argument.get_num_args().map(|values| format!("values {values}")));
    }
    words.push(format!("{:?}", argument.get_action()));
    let listed = |values: Vec<String>| values.join(",");
    let choices = argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect::<Vec<_>>();
    let defaults = argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned());
    let defaults = defaults.collect::<Vec<_>>();
    words.extend((takes_values && !choices.is_empty()).then(|| format!("one of {}", listed(choices))));
    words.extend((takes_values && !defaults.is_empty()).then(|| format!("default {}", listed(defaults))));
    words.extend(argument.is_required_set().then(|| "required".to_owned()));
    words.extend(argument.is_hide_set().then(|| "hidden".to_owned()));
    words.join(" ")
}

fn command_lines(path: &str, command: &clap::Command, lines: &mut BTreeSet<String>) {
    lines.insert(if command.is_hide_set() { format!("{path} (hidden)") } else { path.to_owned() });
    lines.extend(command.get_arguments().map(|argument| argument_line(path, argument)));
    for below in command.get_subcommands() {
        command_lines(&format!("{path} {}", below.get_name()), below, lines);
    }
}

#[test]
fn the_command_line_is_the_frozen_one() {
    let mut lines = BTreeSet::new();
    let mut command = Cli::command();
    command.build();
    command_lines("kvrouted", &command, &mut lines);
    // What clap adds by itself follows its version.
    lines.retain(|line| !line.contains(" help") && !line.contains(" --help") && !line.contains(" --version"));
    compare("command-line.txt", &lines);
}
